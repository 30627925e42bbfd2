"""Qwen2-VL: the text model alone is converted."""
