"""Gemma, the first version."""
