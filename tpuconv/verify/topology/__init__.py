"""Ahead-of-time compilation for TPU slices: whether a model fits, and how fast it may be."""
