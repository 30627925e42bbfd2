"""Qwen2.5-VL, of which the text model is converted."""
