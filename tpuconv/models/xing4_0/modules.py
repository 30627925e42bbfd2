"""Xing 4.0: attention and experts as DeepSeek V3's (arXiv:2412.19437), between several residual streams
(arXiv:2512.24880)."""

from typing import Any, ClassVar

import jax

from tpuconv.models.common.streams import ClampedStreams, StreamMeanNorm, StreamsBlock, to_streams
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.xing4_0.family import Config


class Block(StreamsBlock, deepseek_v3.Block):
    """One layer: attention, then an MLP or experts, each after a norm and between the streams."""

    streams_type = ClampedStreams


class Model(deepseek_v3.Model):
    """Token ids [B, T] to logits [B, T, V]. The layer for multi-token prediction has one residual stream."""

    block: ClassVar[Any] = Block
    norm_type = StreamMeanNorm
    config: Config

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Returns the streams [B, T, (r D)] of the first layer, which are copies of its input."""
        return to_streams(x_BTD, self.config.hc_mult)
