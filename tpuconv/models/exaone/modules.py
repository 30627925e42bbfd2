"""EXAONE 3 (arXiv:2412.04862): the modules of Llama."""

from tpuconv.models.llama import modules as llama


class Model(llama.Model):
    """Token ids [B, T] to logits [B, T, V]."""
