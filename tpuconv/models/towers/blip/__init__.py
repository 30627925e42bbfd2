"""The vision transformer of BLIP-2 (arXiv:2301.12597)."""
