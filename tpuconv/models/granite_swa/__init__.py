"""Granite with sliding windows."""
