"""dots3.note, of which the text model is converted."""
