"""Inkling."""
