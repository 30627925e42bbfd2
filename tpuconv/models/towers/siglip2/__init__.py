"""SigLIP 2 for images of any size (arXiv:2502.14786)."""
