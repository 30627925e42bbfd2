"""EXAONE 4 (arXiv:2507.11407)."""

from tpuconv.models.common.blocks import NormedAttention, PostNormBlock
from tpuconv.models.common.decoder import Decoder


class Block(PostNormBlock):
    """One layer: attention and MLP, each before a norm, with residual connections."""

    attention_type = NormedAttention


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
