"""InternViT (arXiv:2312.14238)."""
