"""Gemma 3n with what sees and hears, of which the text model is converted."""
