"""Molmo 2, of which the text model is converted."""
