"""Aria (arXiv:2410.05993), the text model: attention as in Llama, experts as in Granite 3."""

from tpuconv.models.arcee.modules import Attention
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.granitemoe.modules import MoE


class Block(blocks.PreNormBlock):
    """One layer: attention and experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
