"""Persimmon."""
