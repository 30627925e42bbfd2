"""Kimi K2.5: the modules of Kimi K2."""

from tpuconv.models.kimi_k2 import modules as kimi_k2


class Model(kimi_k2.Model):
    """Token ids [B, T] to logits [B, T, V]."""
