"""DeepSeek-OCR 2, the text model: attention as Llama's, experts as DeepSeek V2's (arXiv:2405.04434)."""

from tpuconv.models.arcee.modules import Attention
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.deepseek_v2.modules import MoE


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
