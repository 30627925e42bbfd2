"""Qwen3-Next."""

from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.delta import DeltaNet, DeltaState
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys
from tpuconv.models.common.mtp import JoinedLayer
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder
from tpuconv.models.modules.experts import SharedAndProbableExperts


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately. The output is gated."""

    norm_type = CenteredRMSNorm

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", config.sizes, bias=bias, dtype=dtype, keys=keys)

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD))


class DeltaBlock(HybridBlock):
    """One layer: linear or full attention, then experts or an MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mixer_type = DeltaNet
    norm_type = CenteredRMSNorm


class Block(DeltaBlock):
    """One layer: linear or full attention, then experts or an MLP, each after a norm, with residual connections."""

    moe_type = SharedAndProbableExperts


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


class DenseModel(DeltaDecoder):
    """Qwen3.5 without experts: token ids [B, T] to logits [B, T, V]."""

    block = DeltaBlock


class Model(DeltaDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = JoinedExpertLayer
