"""Mistral Large 4: with its vision tower, of which the text model is converted."""
