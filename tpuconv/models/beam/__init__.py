"""Beam."""
