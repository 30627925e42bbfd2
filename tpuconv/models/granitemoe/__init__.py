"""Granite 3, mixture of experts."""
