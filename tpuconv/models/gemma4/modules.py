"""Gemma 4 with vision and audio towers: the modules of the text model."""

from tpuconv.models.gemma4_text import modules as gemma4_text


class Model(gemma4_text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
