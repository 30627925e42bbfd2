"""Jais 2."""
