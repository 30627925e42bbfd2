"""LFM2, mixture of experts."""
