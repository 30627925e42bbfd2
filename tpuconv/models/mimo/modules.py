"""MiMo (arXiv:2505.07608): the modules of Qwen2."""

from tpuconv.models.qwen2 import modules as qwen2


class Model(qwen2.Model):
    """Token ids [B, T] to logits [B, T, V]."""
