"""Qwen2.5-Omni (arXiv:2503.20215): the modules of Qwen2. The three positions of a text token are equal, so that its
rotary positions are plain."""

from tpuconv.models.qwen2 import modules as qwen2


class Model(qwen2.Model):
    """Token ids [B, T] to logits [B, T, V]."""
