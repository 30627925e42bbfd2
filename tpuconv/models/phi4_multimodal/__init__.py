"""Phi-4-multimodal, of which the text model is converted."""
