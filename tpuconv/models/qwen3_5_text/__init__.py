"""Qwen3.5, dense, the text model."""
