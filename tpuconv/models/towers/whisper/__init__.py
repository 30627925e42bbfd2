"""Whisper (arXiv:2212.04356) as the encoder of language models."""
