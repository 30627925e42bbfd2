"""Gemma 4 with what sees and hears, of which the text model is converted."""
