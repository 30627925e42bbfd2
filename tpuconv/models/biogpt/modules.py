"""BioGPT (arXiv:2210.10341): GPT-2 with scaled embeddings."""

from tpuconv.models.common.layers import LayerNorm
from tpuconv.models.common.positions import PositionedDecoder
from tpuconv.models.xglm.modules import Block, ScaledDecoder


class Model(ScaledDecoder, PositionedDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
