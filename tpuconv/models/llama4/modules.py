"""Llama 4 with its vision tower: the modules of the text model."""

from tpuconv.models.llama4_text import modules as llama4_text


class Model(llama4_text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
