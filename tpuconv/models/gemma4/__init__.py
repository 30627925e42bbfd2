"""Gemma 4 with vision and audio towers; only the text model is converted."""
