"""Gemma 3 with its vision tower, of which the text model is converted."""
