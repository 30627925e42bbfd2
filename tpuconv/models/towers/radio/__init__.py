"""RADIO (arXiv:2312.06709), the encoder of images of Nemotron 3 Nano Omni."""
