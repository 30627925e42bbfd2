"""Mellum 2: the attention of Qwen3 (arXiv:2505.09388) with sliding windows, and its experts."""

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.dots1.modules import Attention
from tpuconv.models.qwen3_moe.modules import MoE


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
