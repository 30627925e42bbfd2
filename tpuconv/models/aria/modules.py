"""Aria (arXiv:2410.05993), the text model: attention as in Llama, experts as in Granite 3."""

from tpuconv.models.build import attention_class
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.modules.experts import BestExperts
from tpuconv.models.parts import Attn


class Block(blocks.PreNormBlock):
    """One layer: attention and experts, each after a norm, with residual connections."""

    attention_type = attention_class(Attn("attention_bias"))
    moe_type = BestExperts


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
