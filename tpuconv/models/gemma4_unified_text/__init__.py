"""Gemma 4 without towers, the text model on its own."""
