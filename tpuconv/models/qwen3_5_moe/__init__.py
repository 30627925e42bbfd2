"""Qwen3.5 with experts, of which the text model is converted."""
