"""The encoder of Parakeet, a Fast Conformer (arXiv:2305.05084)."""
