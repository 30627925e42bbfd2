"""The encoder with which Janus understands images, and its aligner (arXiv:2501.17811)."""
