"""Qwen3, mixture of experts."""
