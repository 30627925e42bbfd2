"""Calibrated quantization: weights are rounded so that the outputs of products change less."""
