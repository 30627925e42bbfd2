"""Apertus."""
