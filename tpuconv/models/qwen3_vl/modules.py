"""Qwen3-VL, dense: the modules of Qwen3. The three positions of a text token are equal, so that its rotary positions
are plain."""

from tpuconv.models.qwen3 import modules as qwen3


class Model(qwen3.Model):
    """Token ids [B, T] to logits [B, T, V]."""
