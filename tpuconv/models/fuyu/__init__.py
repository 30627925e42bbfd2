"""Fuyu, of which the text model is converted."""
