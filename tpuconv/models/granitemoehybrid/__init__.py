"""Granite 4, hybrid."""
