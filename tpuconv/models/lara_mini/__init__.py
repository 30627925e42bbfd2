"""Lara 4 Mini."""
