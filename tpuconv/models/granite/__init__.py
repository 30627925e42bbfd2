"""Granite 3, dense."""
