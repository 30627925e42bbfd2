"""The text model of North Micro Vision: as Cohere 2 (arXiv:2504.00698), with rotary positions as Llama's, in the layers
that have them."""

from functools import partial

from tpuconv.models.arcee.modules import Attention
from tpuconv.models.cohere2 import modules as cohere2
from tpuconv.models.common import blocks
from tpuconv.models.common.layers import LayerNorm


class Block(blocks.ParallelBlock):
    """One layer: attention and MLP, both after the same norm, with one residual connection."""

    attention_type = Attention
    norm_type = partial(LayerNorm, bias=False)


class Model(cohere2.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
