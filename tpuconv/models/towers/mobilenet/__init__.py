"""MobileNetV5, the image encoder of Gemma 3n: the blocks of MobileNetV4 (arXiv:2404.10518)."""
