"""Youtu-LLM: the latent attention of DeepSeek V3 (arXiv:2405.04434) in a dense model."""

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.deepseek_v3 import modules as deepseek_v3


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = deepseek_v3.Attention


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    cached = deepseek_v3.Latent.empty
