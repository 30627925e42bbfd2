"""MiMo-V2-Flash (arXiv:2601.02780)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks, mtp
from tpuconv.models.common.cache import KV, append_kv, empty_vectors
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, apply_rope, attention, times
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.sinks import attention_with_sinks
from tpuconv.models.common.steps import NO_WINDOW, Step
from tpuconv.models.deepseek_v3.modules import MoE
from tpuconv.models.mimo_v2_flash.family import Config
from tpuconv.notation.letters import with_letters


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Values
    have another width than keys, and a factor. Layers with a sliding window have other key-value heads, and sinks."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = sizes_of(config, layer), config.attention_bias
        self.factor = 1.0 if config.attention_value_scale is None else config.attention_value_scale
        self.q = Einsum("BTD,DNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKw->BTKw", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNw,NwD->BTD", sizes, dtype=dtype, keys=keys)
        self.sinks = nnx.Param(jnp.zeros(sizes["N"], dtype)) if layer not in config.layer_sets["full_layers"] else None

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        q_BTNH, kv = self.projected(x_BTD, step, kv)
        return self.attended(q_BTNH, kv, step.visible(window)), kv

    def projected(self, x_BTD: jax.Array, step: Step, kv: KV | None) -> tuple[jax.Array, KV]:
        """Returns the queries, and the keys and values of all tokens so far."""
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        kv = append_kv(kv, apply_rope(self.k(x_BTD), cos_sin), times(self.v(x_BTD), self.factor), step.slot)
        return apply_rope(self.q(x_BTD), cos_sin), kv

    def attended(self, q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array) -> jax.Array:
        """Returns the output for the tokens of a mask [B, T, S]."""
        if self.sinks is None:
            return self.o(attention(q_BTNH, kv, visible_BTS))
        return self.o(attention_with_sinks(q_BTNH, kv, visible_BTS, self.sinks[...]))


def sizes_of(config: Config, layer: int) -> dict[str, int]:
    """Returns the sizes of a layer's heads: w is the dimension of a value. The layer for multi-token prediction has the
    window."""
    heads = "full_kv_heads" if layer in config.layer_sets["full_layers"] else "K"
    return with_letters(config.sizes, {"K": heads, "w": "value_head_dim"})


def new_kv(config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> KV:
    """Returns the empty cache of a layer; `shape` is [B, S]."""
    sizes = sizes_of(config, layer)
    (k, k_scale), (v, v_scale) = (empty_vectors((*shape, sizes["K"], sizes[width]), dtype) for width in "Hw")
    return KV(k, v, k_scale, v_scale)


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    moe_type: ClassVar[Any] = MoE

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return Attention(config, layer, dtype=dtype, keys=keys)


class MTPLayer(mtp.MTPLayer, Block):
    """The layer for multi-token prediction, which has the window and an MLP."""

    moe_type = None

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.window = config.sliding_window or NO_WINDOW


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    cached = staticmethod(new_kv)
    mtp_type = mtp.mtp_module(MTPLayer)
    config: Config

    @property
    def mtp_rope(self) -> tuple[Rope | None, int]:
        return self.config.local_rope, int(self.config.sizes["H"] * self.config.local_rotary)

    def mtp_inputs(self, next_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.embed(next_BT), x_BTD
