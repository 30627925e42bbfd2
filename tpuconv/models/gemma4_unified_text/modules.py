"""Gemma 4 without towers, the text model on its own: the modules of Gemma 4."""

from tpuconv.models.gemma4_text import modules as gemma4_text


class Model(gemma4_text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
