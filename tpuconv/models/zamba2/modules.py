"""Zamba 2 (arXiv:2411.15242): Mamba-2 in each layer, and before some of them one of a few blocks of attention and MLP
whose weights these layers share. Each use of a block has adapters of its own."""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks, mamba2
from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, attention, gelu
from tpuconv.models.common.mamba2 import GatedGroupNorm, MambaState
from tpuconv.models.common.recurrence import HybridDecoder, LayerState
from tpuconv.models.common.steps import Step
from tpuconv.models.zamba2.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"j": "joined_width", "r": "adapter_rank"}
"""The words of this module, by the letters of its einsums and arrays."""

EPS_OF_MIXER = 1e-5
"""The constant of the norm in Mamba-2, whatever config.json has."""


class FixedEpsMamba2(mamba2.Mamba2):
    """Mamba-2, x [B, T, D] to [B, T, D]. Also returns the state after these tokens."""

    def new_norm(self, config: Config, dtype: DTypeLike) -> GatedGroupNorm:
        return GatedGroupNorm(config, eps=EPS_OF_MIXER, dtype=dtype)


class HeadsAdapter(nnx.Module):
    """A product of low rank: x [B, T, 2 D] to queries [B, T, N, H], or to keys or values."""

    def __init__(self, config: Config, heads: str, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.down = Einsum("BTj,jr->BTr", sizes, dtype=dtype, keys=keys)
        self.up = Einsum(f"BTr,r{heads}H->BT{heads}H", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTj: jax.Array) -> jax.Array:
        return self.up(self.down(x_BTj))


class MLPAdapter(nnx.Module):
    """Products of low rank: x [B, T, D] to what is added to the gate and to the other factor, each [B, T, F]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.down = Einsum("BTD,Dr->BTr", sizes, dtype=dtype, keys=keys)
        self.gate = Einsum("BTr,rF->BTF", sizes, dtype=dtype, keys=keys)
        self.up = Einsum("BTr,rF->BTF", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_BTr = self.down(x_BTD)
        return self.gate(y_BTr), self.up(y_BTr)


class Adapters(nnx.Module):
    """The adapters of one use of a shared block."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        has_attention = config.use_shared_attention_adapter
        self.q = HeadsAdapter(config, "N", dtype=dtype, keys=keys) if has_attention else None
        self.k = HeadsAdapter(config, "K", dtype=dtype, keys=keys) if has_attention else None
        self.v = HeadsAdapter(config, "K", dtype=dtype, keys=keys) if has_attention else None
        self.mlp = MLPAdapter(config, dtype=dtype, keys=keys)


class Attention(blocks.JoinedAttention):
    """Attention, perhaps with adapters, [B, T, 2 D] to [B, T, D]. Also returns the keys and values of all tokens so
    far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.scale = (config.sizes["H"] / 2) ** -0.5

    def adapted(
        self, x_BTj: jax.Array, adapters: Adapters | None, step: Step, window: jax.Array | int, kv: KV | None
    ) -> tuple[jax.Array, KV]:
        """Returns the output [B, T, D] of a use with these adapters, and all keys and values."""
        own = (adapters.q, adapters.k, adapters.v) if adapters else (None,) * 3
        q_BTNH, k_BTKH, v_BTKH = (
            part(x_BTj) if adapter is None else part(x_BTj) + adapter(x_BTj)
            for part, adapter in zip((self.q, self.k, self.v), own, strict=True)
        )
        q_BTNH, k_BTKH = self.positioned(q_BTNH, k_BTKH, step)
        kv = append_kv(kv, k_BTKH, v_BTKH, step.slot)
        return self.o(attention(q_BTNH, kv, step.visible(window), scale=self.scale)), kv


class MLP(blocks.GatedMLP):
    """Gated MLP, perhaps with adapters, x [B, T, D] to [B, T, D]."""

    def adapted(self, x_BTD: jax.Array, adapters: Adapters | None) -> jax.Array:
        """Returns the output of a use with these adapters."""
        gate_BTF, up_BTF = adapters.mlp(x_BTD) if adapters else (0, 0)
        return self.down(gelu(self.gate(x_BTD) + gate_BTF) * (self.up(x_BTD) + up_BTF))


class Block(nnx.Module):
    """One layer: Mamba-2 after a norm, with a residual connection. In a layer with attention its input has the output
    of a shared block besides, which `step.input` describes. The first layer that runs a shared block holds it."""

    mixer_type: ClassVar[Callable[..., Any]] = FixedEpsMamba2
    has_adapters: ClassVar[bool] = True

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes, eps, sets = with_letters(config.sizes, {"j": "joined_width"}), config.rms_norm_eps, config.layer_sets
        self.mamba_norm = RMSNorm("D", sizes, eps, dtype=dtype)
        self.mamba = self.mixer_type(config, dtype=dtype, keys=keys)
        if layer in sets["attention_layers"]:
            self.mix = Einsum("BTA,AD->BTD", {**sizes, "A": sizes["D"]}, dtype=dtype, keys=keys)
        if layer not in sets["sharing_layers"]:
            return
        self.attn_norm = RMSNorm("j", sizes, eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.mlp_norm = RMSNorm("D", sizes, eps, dtype=dtype)
        self.mlp = MLP(config, bias=self.has_adapters and config.mamba_proj_bias, dtype=dtype, keys=keys)
        if not self.has_adapters:
            return
        uses = sets[f"uses_{sets['sharing_layers'].index(layer)}"]
        self.adapters = nnx.List([Adapters(config, dtype=dtype, keys=keys) for _ in uses])

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        if step.input is None:
            y_BTD, state = self.mamba(self.mamba_norm(x_BTD), step, window, kv)
            return x_BTD + y_BTD, state
        old_keys, old_state = kv or (None, None)
        y_BTD, keys_values = step.input.output(x_BTD, step, window, old_keys)
        y_BTD, state = self.mamba(self.mamba_norm(x_BTD + self.mix(y_BTD)), step, window, old_state)
        return x_BTD + y_BTD, (keys_values, state)


class Use(NamedTuple):
    """One use of a shared block.

    Attributes:
        holder: the layer that holds the block.
        number: the place of the use among the uses of the block.
        embedded_BTD: the embeddings of the tokens.
    """

    holder: Block
    number: int
    embedded_BTD: jax.Array

    def output(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        """Returns the output [B, T, D] of the block, and all keys and values of this use."""
        holder = self.holder
        adapters = holder.adapters[self.number] if holder.has_adapters else None
        joined_BTj = holder.attn_norm(jnp.concatenate([x_BTD, self.embedded_BTD], axis=-1))
        y_BTD, kv = holder.attn.adapted(joined_BTj, adapters, step, window, kv)
        return holder.mlp.adapted(holder.mlp_norm(y_BTD), adapters), kv


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    state_type: ClassVar[type[LayerState]] = MambaState
    config: Config

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer, a state, and in a layer with attention keys and values before it; `shape`
        is [B, S]."""
        state = self.state_type.empty(config, *shape[:-1])
        return (KV.empty(config, layer, shape, dtype), state) if layer in config.layers_of("hybrid") else state

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> list[Use | None]:
        layers, shared = self.config.layers_of("hybrid"), self.config.num_mem_blocks
        uses = {
            layer: Use(self.layers[layers[place % shared]], place // shared, x_BTD)
            for place, layer in enumerate(layers)
        }
        return [uses.get(layer) for layer in range(self.config.num_hidden_layers)]
