"""Kimi K2.5, of which the text model is converted."""
