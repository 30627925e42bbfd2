"""Gemma 4 without towers (12B), of which the text model is converted."""
