"""Hunyuan-VL, the text model."""
