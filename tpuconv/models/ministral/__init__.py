"""Ministral 8B."""
