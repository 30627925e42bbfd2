"""Qwen1.5 and Qwen2, mixture of experts."""
