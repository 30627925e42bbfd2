"""Emu3 (arXiv:2409.18869): the modules of Llama."""

from tpuconv.models.llama import modules as llama


class Model(llama.Model):
    """Token ids [B, T] to logits [B, T, V]."""
