"""Gemma 3, the text model on its own."""
