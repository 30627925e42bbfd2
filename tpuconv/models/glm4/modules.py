"""GLM-4 of April 2025 (arXiv:2406.12793): with norms after attention and MLP too."""

from tpuconv.models.common.blocks import SandwichBlock
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.glm.modules import Attention


class Block(SandwichBlock):
    """One layer: attention and MLP, each between two norms, with residual connections."""

    attention_type = Attention


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
