"""Hunyuan, dense."""
