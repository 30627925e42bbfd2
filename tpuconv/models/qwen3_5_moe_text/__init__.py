"""Qwen3.5 with experts, the text model."""
