"""Hunyuan, mixture of experts."""
