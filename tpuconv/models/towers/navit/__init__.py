"""SigLIP for images of any size, padded to the largest (NaViT, arXiv:2307.06304): Idefics, SmolVLM, Aria."""
