"""Qwen3-VL, dense, of which the text model is converted."""
