"""Families that are made of parts, by their lineages. None of these files needs jax."""
