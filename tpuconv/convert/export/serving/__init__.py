"""Quantized parameters in the formats that servers read."""
