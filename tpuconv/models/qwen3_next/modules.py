"""Qwen3-Next."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Step
from tpuconv.models.common.delta import DeltaNet, DeltaState
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys, attention
from tpuconv.models.common.mtp import JoinedLayer
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder
from tpuconv.models.qwen2_moe.modules import MoE


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


class JoinedDeltaLayer(JoinedLayer):
    """The module for multi-token prediction: the joined inputs and a layer with full attention."""

    norm_type = CenteredRMSNorm
    block = DeltaBlock


class JoinedExpertLayer(JoinedDeltaLayer):
    """The module for multi-token prediction of a model with experts."""

    block = Block


class DeltaDecoder(HybridDecoder):
    """A decoder with linear attention in some layers."""

    norm_type = CenteredRMSNorm
    state_type = DeltaState
    mtp_type = JoinedDeltaLayer


class Model(DeltaDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = JoinedExpertLayer
