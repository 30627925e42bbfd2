"""EXAONE 4."""
