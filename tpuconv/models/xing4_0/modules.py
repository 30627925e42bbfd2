"""Xing 4.0: attention and experts as DeepSeek V3's (arXiv:2412.19437), between several residual streams
(arXiv:2512.24880)."""

from typing import Any, ClassVar

from tpuconv.models.common.streams import ClampedStreams, StreamMeanNorm, StreamsBlock, StreamsDecoder
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.xing4_0.family import Config


class Block(StreamsBlock, deepseek_v3.Block):
    """One layer: attention, then an MLP or experts, each after a norm and between the streams."""

    streams_type = ClampedStreams


class Model(StreamsDecoder, deepseek_v3.Model):
    """Token ids [B, T] to logits [B, T, V]. The layer for multi-token prediction has one residual stream."""

    block: ClassVar[Any] = Block
    norm_type = StreamMeanNorm
    config: Config
