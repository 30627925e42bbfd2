"""Helium."""
