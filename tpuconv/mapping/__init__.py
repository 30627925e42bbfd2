"""The tables of families, and what they mean for tensors and scales."""
