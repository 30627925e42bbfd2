"""Gemma 4, the text model on its own."""
