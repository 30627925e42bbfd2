"""Jais 2: Llama (arXiv:2302.13971) with layer norms and an MLP without a gate."""

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import LayerNorm
from tpuconv.models.nemotron.modules import MLP, Attention


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = LayerNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
