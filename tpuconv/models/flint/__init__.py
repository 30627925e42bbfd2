"""Flint."""
