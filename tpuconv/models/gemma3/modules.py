"""Gemma 3 with its vision tower: the modules of the text model."""

from tpuconv.models.gemma3_text import modules as gemma3_text


class Model(gemma3_text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
