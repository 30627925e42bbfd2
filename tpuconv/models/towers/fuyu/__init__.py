"""The matrix of patches of Fuyu."""
