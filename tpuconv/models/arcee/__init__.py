"""Arcee."""
