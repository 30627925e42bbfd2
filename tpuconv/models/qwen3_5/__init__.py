"""Qwen3.5, dense, of which the text model is converted."""
