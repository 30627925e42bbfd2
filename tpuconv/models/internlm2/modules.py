"""InternLM 2 (arXiv:2403.17297): the modules of Llama."""

from tpuconv.models.llama import modules as llama


class Model(llama.Model):
    """Token ids [B, T] to logits [B, T, V]."""
