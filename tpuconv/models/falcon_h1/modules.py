"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks, mamba2
from tpuconv.models.common.cache import KV
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, normalize, times
from tpuconv.models.common.mamba2 import LEGEND, MambaState
from tpuconv.models.common.recurrence import HybridDecoder
from tpuconv.models.common.steps import Step
from tpuconv.models.falcon_h1.family import Config
from tpuconv.notation.letters import with_letters


class Attention(blocks.Attention):
    """Grouped-query attention with a factor of keys, x [B, T, D] to [B, T, D]. Also returns the keys and values of all
    tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)
        self.key_factor = config.key_multiplier

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        return super().positioned(q_BTNH, times(k_BTKH, self.key_factor), step)


class Gate(nnx.Module):
    """The product of outputs and gates, in float32, with an RMS norm of each group before it, after it, or without."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        self.eps, self.is_first = config.rms_norm_eps, config.mamba_norm_before_gate
        sizes = with_letters(config.sizes, LEGEND)
        shape = tuple(sizes[letter] for letter in "nrw")
        self.scale = nnx.Param(jnp.ones(shape, dtype)) if config.mamba_rms_norm else None

    def __call__(self, y_BTnrw: jax.Array, z_BTnrw: jax.Array) -> jax.Array:
        if self.scale is None:
            return y_BTnrw * nnx.silu(z_BTnrw).astype(jnp.float32)
        gate_BTnrw, scale_nrw = nnx.silu(z_BTnrw.astype(jnp.float32)), self.scale[...].astype(jnp.float32)
        if self.is_first:
            return normalize(y_BTnrw, 2, self.eps) * scale_nrw * gate_BTnrw
        return normalize(y_BTnrw * gate_BTnrw, 2, self.eps) * scale_nrw


class ScaledMamba2(mamba2.Mamba2):
    """Mamba-2 with factors of its inputs, x [B, T, D] to [B, T, D]. Also returns the state after these tokens."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        sizes = with_letters(config.sizes, LEGEND)
        self.o = Einsum("BTnrw,nrwD->BTD", sizes, bias=config.projectors_bias, dtype=dtype, keys=keys)

    def inputs(self, x_BTD: jax.Array) -> tuple[jax.Array, ...]:
        given = super().inputs(times(x_BTD, self.config.ssm_in_multiplier))
        return tuple(y * jnp.asarray(factor, y.dtype) for y, factor in zip(given, self.config.ssm_factors, strict=True))

    def new_norm(self, config: Config, dtype: DTypeLike) -> Gate:
        return Gate(config, dtype=dtype)


class MLP(blocks.GatedMLP):
    """Gated MLP with factors of the gate and of the output, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.mlp_bias, dtype=dtype, keys=keys)
        self.gate_factor, self.down_factor = config.mlp_factors

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return times(super().__call__(x_BTD), self.down_factor)

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return nnx.silu(times(x_BTF, self.gate_factor))


class Block(nnx.Module):
    """One layer: attention and Mamba-2, whose outputs are added, then an MLP, each after a norm, with residual
    connections."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.mamba = ScaledMamba2(config, dtype=dtype, keys=keys)
        self.mlp_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, keys=keys)
        self.config = config

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: tuple[KV, MambaState] | None
    ) -> tuple[jax.Array, Any]:
        config, (old_keys, old_state) = self.config, kv or (None, None)
        y_BTD = self.attn_norm(x_BTD)
        m_BTD, state = self.mamba(y_BTD, step, window, old_state)
        y_BTD, keys_values = self.attn(times(y_BTD, config.attention_in_multiplier), step, window, old_keys)
        m_BTD, y_BTD = times(m_BTD, config.ssm_out_multiplier), times(y_BTD, config.attention_out_multiplier)
        x_BTD = x_BTD + (m_BTD + y_BTD)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), (keys_values, state)


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    state_type = MambaState
    config: Config

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer, keys and values and a state; `shape` is [B, S], or [L, B, S]."""
        return KV.empty(config, layer, shape, dtype), MambaState.empty(config, *shape[:-1])

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return times(x_BTD, self.config.embedding_multiplier)

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        return times(logits_BTV, self.config.lm_head_multiplier)
