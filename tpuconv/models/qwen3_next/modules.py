"""Qwen3-Next."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import NO_WINDOW, Step
from tpuconv.models.common.delta import DeltaNet, DeltaState
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys, attention
from tpuconv.models.common.mtp import JoinedInputs
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder
from tpuconv.models.qwen2_moe.modules import MoE

FIRST = "0"
"""The name of the layer for multi-token prediction."""


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately. The output is gated."""

    norm_type = CenteredRMSNorm

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", config.axes, bias=bias, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        q_BTNH, k_BTKH = self.positioned(self.q(x_BTD), self.k(x_BTD), step)
        kv = append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)
        return self.o(attention(q_BTNH, kv, step.visible(window)) * nnx.sigmoid(self.gate(x_BTD))), kv


class DeltaBlock(HybridBlock):
    """One layer: linear or full attention, then experts or an MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mixer_type = DeltaNet
    norm_type = CenteredRMSNorm


class Block(DeltaBlock):
    """One layer: linear or full attention, then experts or an MLP, each after a norm, with residual connections."""

    moe_type = MoE


class JoinedLayer(JoinedInputs):
    """The module for multi-token prediction: the joined inputs and a layer with full attention, a `DeltaBlock`. See
    `MTPModule` of `models/common`."""

    norm_type = CenteredRMSNorm
    block: ClassVar[Callable[..., Any]] = DeltaBlock

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.add_parts(config, dtype=dtype, keys=keys)
        setattr(self, FIRST, self.block(config, config.num_hidden_layers, dtype=dtype, keys=keys))

    def __call__(self, next_BTD: jax.Array, x_BTD: jax.Array, step: Step, kv: Any) -> tuple[jax.Array, Any]:
        y_BTD, kv = getattr(self, FIRST)(self.joined_inputs(next_BTD, x_BTD), step, NO_WINDOW, kv)
        return self.norm(y_BTD), kv


class JoinedExpertLayer(JoinedLayer):
    """The module for multi-token prediction of a model with experts."""

    block = Block


class DeltaDecoder(HybridDecoder):
    """A decoder with linear attention in some layers."""

    norm_type = CenteredRMSNorm
    state_type = DeltaState
    mtp_type = JoinedLayer


class Model(DeltaDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = JoinedExpertLayer
