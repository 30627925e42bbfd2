"""Quantization by Qwix rules, tensor by tensor, to exactly what Qwix makes of the whole model."""
