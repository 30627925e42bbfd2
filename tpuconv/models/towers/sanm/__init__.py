"""The encoder of Fun-ASR (SAN-M, arXiv:2006.01713)."""
