"""dots3.note, the text model saved on its own."""
