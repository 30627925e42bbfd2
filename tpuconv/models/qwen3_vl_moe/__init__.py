"""Qwen3-VL with experts, of which the text model is converted."""
