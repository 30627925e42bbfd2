"""Dory."""
