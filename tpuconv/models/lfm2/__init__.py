"""LFM2, dense."""
