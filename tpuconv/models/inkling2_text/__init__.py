"""Inkling 2."""
