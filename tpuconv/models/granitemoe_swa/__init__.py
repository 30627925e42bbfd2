"""Granite with sliding windows, mixture of experts."""
