"""Kimi K2."""
