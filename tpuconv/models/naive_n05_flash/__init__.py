"""Naive-N0.5-Flash."""
