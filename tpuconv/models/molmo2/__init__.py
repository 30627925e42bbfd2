"""Molmo 2."""
