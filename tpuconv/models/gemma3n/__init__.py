"""Gemma 3n with vision and audio towers; only the text model is converted."""
