"""GPT-Neo (https://doi.org/10.5281/zenodo.5297715): GPT-2 with windows, and with scores that have no factor."""

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Keys
from tpuconv.models.gpt2 import modules as gpt2
from tpuconv.models.gpt_neo.family import Config


class Attention(blocks.Attention):
    """Attention without rotary positions, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so
    far."""

    scale = 1.0

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, out_bias=True, dtype=dtype, keys=keys)


class Block(gpt2.Block):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    attention_type = Attention


class Model(gpt2.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
