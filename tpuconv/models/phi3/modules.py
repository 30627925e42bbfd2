"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905)."""

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.decoder import Decoder


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]. The layers are Llama's; matrices are stored together."""

    block = PreNormBlock
