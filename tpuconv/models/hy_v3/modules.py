"""Hy3: the layers of dots.llm1, which equal DeepSeek V3 (arXiv:2412.19437) except for their attention."""

from tpuconv.models.common import mtp
from tpuconv.models.dots1 import modules as dots1


class MTPLayer(mtp.MTPLayer, dots1.Block):
    """The layer for multi-token prediction."""


class MTPModule(mtp.MTPModule):
    """The module for multi-token prediction."""

    layer_type = MTPLayer


class Model(dots1.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    mtp_type = MTPModule
