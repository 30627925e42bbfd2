"""Mellum 2."""
