"""Stored tensors to values and back: FP8, INT8, INT4, FP4."""
