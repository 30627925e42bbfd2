"""MoonViT (arXiv:2504.07491) and the vision encoder of Muse."""
