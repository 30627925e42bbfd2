"""EXAONE 3."""
