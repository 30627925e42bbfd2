"""The projectors of LLaVA (arXiv:2310.03744) and its kin."""
