"""Q-Formers: learned queries that read windows of features (arXiv:2301.12597)."""
