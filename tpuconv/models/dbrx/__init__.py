"""DBRX."""
