"""Emu3, of which the text model is converted."""
