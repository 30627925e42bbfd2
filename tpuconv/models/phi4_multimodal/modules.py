"""Phi-4-multimodal (arXiv:2503.01743): the modules of Phi-4-mini."""

from tpuconv.models.phi3 import modules as phi3


class Model(phi3.Model):
    """Token ids [B, T] to logits [B, T, V]."""
