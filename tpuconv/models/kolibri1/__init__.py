"""Kolibri 1."""
