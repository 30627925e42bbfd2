"""Dory: a normalized transformer (nGPT, arXiv:2410.01131) in which the middle layers run several times."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Einsum, Keys, times
from tpuconv.models.common.loops import LoopedDecoder
from tpuconv.models.common.steps import Step
from tpuconv.models.dory.family import Config


class UnitNorm(nnx.Module):
    """Vectors of length 1 over the last axes, which have these letters: x / sqrt(sum(x^2) + eps) in float32, rounded
    to the dtype of x."""

    def __init__(self, letters: str, sizes: Any, eps: float, *, dtype: DTypeLike):
        self.axes, self.eps = tuple(range(-len(letters), 0)), eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x_32 = x.astype(jnp.float32)
        return (x_32 * jax.lax.rsqrt(jnp.sum(jnp.square(x_32), self.axes, keepdims=True) + self.eps)).astype(x.dtype)


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    have a learned factor for each dimension after they got rotary positions; the output has gates with such a
    factor, and unit length over all heads."""

    norm_type = UnitNorm

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias, sizes = config.attention_bias, config.sizes
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", sizes, dtype=dtype, keys=keys)
        self.sqk = nnx.Param(jnp.full((sizes["N"], sizes["H"]), config.initializer_range, dtype))
        self.s_gate = nnx.Param(jnp.full((sizes["N"], sizes["H"]), config.initializer_range, dtype))
        self.norm = UnitNorm("NH", sizes, config.rms_norm_eps, dtype=dtype)
        self.query_factor = sizes["H"] ** 0.5 / config.initializer_range
        self.gate_factor = sizes["D"] ** 0.25 / config.initializer_range

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = super().positioned(q_BTNH, k_BTKH, step)
        return q_BTNH * jnp.square(times(self.sqk[...], self.query_factor)), k_BTKH

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        gates_BTNH = nnx.sigmoid(self.gate(x_BTD) * jnp.square(times(self.s_gate[...], self.gate_factor)))
        return self.norm(y_BTNH * gates_BTNH)


class MLP(blocks.GatedMLP):
    """Gated MLP, x [B, T, D] to [B, T, D]. Gates and values have learned factors, the hidden states unit length."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.mlp_bias, dtype=dtype, keys=keys)
        sizes = config.sizes
        self.suv_gate = nnx.Param(jnp.ones(sizes["F"], dtype))
        self.suv_up = nnx.Param(jnp.ones(sizes["F"], dtype))
        self.norm = UnitNorm("F", sizes, config.rms_norm_eps, dtype=dtype)
        self.factor = sizes["D"] ** 0.5

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        gate_BTF = self.gate(x_BTD) * times(self.suv_gate[...], self.factor)
        up_BTF = self.up(x_BTD) * times(self.suv_up[...], self.factor)
        return self.down(self.norm(self.act(gate_BTF) * up_BTF))


class Block(blocks.SandwichBlock):
    """One layer: attention, then an MLP, each between two norms. The hidden states move to the output of each by a
    learned part of the way in each dimension."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = UnitNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.attn_alpha = nnx.Param(jnp.full(config.sizes["D"], config.initializer_range, dtype))
        self.mlp_alpha = nnx.Param(jnp.full(config.sizes["D"], config.initializer_range, dtype))
        self.factor = config.ngpt_alpha_init / config.initializer_range

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        x_BTD = self.attn_norm(x_BTD)
        y_BTD, kv = self.attn(x_BTD, step, window, kv)
        x_BTD = self.moved(x_BTD, self.post_attn_norm(y_BTD), self.attn_alpha[...])
        x_BTD = self.mlp_norm(x_BTD)
        return self.moved(x_BTD, self.post_mlp_norm(self.fed(x_BTD)), self.mlp_alpha[...]), kv

    def moved(self, x_BTD: jax.Array, y_BTD: jax.Array, alpha_D: jax.Array) -> jax.Array:
        """Returns the hidden states on their way from x to y."""
        return x_BTD + jnp.abs(times(alpha_D, self.factor)) * (y_BTD - x_BTD)


class Model(LoopedDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = UnitNorm
    config: Config

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, **options: Any):
        super().__init__(config, dtype=dtype, **options)
        if config.has_logits:
            self.logit_scale = nnx.Param(jnp.full(config.sizes["V"], config.initializer_range, dtype))

    def entering(self, execution: int, x_BTD: jax.Array, kept: dict[str, jax.Array]) -> jax.Array:
        """As `LoopedDecoder.entering`. Each loop begins with the output of the last one and the input of the first."""
        looped, place = self.config.looped, execution - self.config.looped.start
        if not 0 <= place < len(looped) * self.config.n_recurrent_loops or place % len(looped):
            return x_BTD
        x_BTD = self.norm(x_BTD)
        return x_BTD + kept.setdefault("first", x_BTD)

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        scale_V = self.logit_scale[...].astype(jnp.float32) * (1 / self.config.initializer_range)
        scaled_BTV: jax.Array = logits_BTV.astype(jnp.float32) * scale_V
        return scaled_BTV
