"""Gemma 3n with vision and audio towers: the modules of the text model."""

from tpuconv.models.gemma3n_text import modules as gemma3n_text


class Model(gemma3n_text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
