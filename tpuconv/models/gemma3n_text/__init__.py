"""Gemma 3n, the text model on its own."""
