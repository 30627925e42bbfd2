"""SigLIP (arXiv:2303.15343) and its kin."""
