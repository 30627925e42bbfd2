"""dots3.note: the modules of the text model."""

from tpuconv.models.dots3_note_text import modules as dots3_note_text


class Model(dots3_note_text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
