"""Ministral 3."""
