"""K-EXAONE: attention as EXAONE 4 (arXiv:2507.11407), experts as DeepSeek V3 (arXiv:2412.19437)."""

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.deepseek_v3.modules import MoE


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = blocks.NormedAttention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
