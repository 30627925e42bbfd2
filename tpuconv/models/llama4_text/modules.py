"""The text model of Llama 4, saved separately: the modules of Llama 4."""

from tpuconv.models.llama4 import modules as llama4


class Model(llama4.Model):
    """Token ids [B, T] to logits [B, T, V]."""
