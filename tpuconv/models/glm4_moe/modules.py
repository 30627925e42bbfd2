"""GLM-4.5, GLM-4.6 and GLM-4.7 (arXiv:2508.06471)."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks, mtp
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, RMSNorm
from tpuconv.models.deepseek_v3.modules import MoE
from tpuconv.models.glm4_moe.family import Config


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. The
    larger models normalize queries and keys, each head separately."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, dtype=dtype, keys=keys)
        sizes, eps, normed = config.axes, config.rms_norm_eps, config.use_qk_norm
        self.q_norm = RMSNorm("H", sizes, eps, dtype=dtype) if normed else None
        self.k_norm = RMSNorm("H", sizes, eps, dtype=dtype) if normed else None

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        return super().positioned(q_BTNH, k_BTKH, step)


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class MTPLayer(mtp.MTPLayer, Block):
    """The layer for multi-token prediction."""


class MTPModule(mtp.MTPModule):
    """The module for multi-token prediction."""

    layer_type = MTPLayer


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = MTPModule
