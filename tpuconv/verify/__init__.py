"""Checks of a checkpoint: checksums, logits against transformers, speed, and fit on TPU slices."""
