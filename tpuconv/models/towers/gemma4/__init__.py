"""The encoders of Gemma 4, and of its variant without encoders."""
