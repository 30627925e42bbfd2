"""PaddleOCR-VL (arXiv:2510.14528): ERNIE 4.5 with rotary positions that turn the halves of a head, as Llama's. The
three positions of a text token are equal, so that they are plain."""

import jax

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Step
from tpuconv.models.ernie4_5 import modules as ernie4_5


class Attention(ernie4_5.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        return blocks.Attention.positioned(self, q_BTNH, k_BTKH, step)


class Block(ernie4_5.Block):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention


class Model(ernie4_5.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
