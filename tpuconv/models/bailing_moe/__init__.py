"""Ling 2 (Bailing)."""
