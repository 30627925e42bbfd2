"""Kimi Linear."""
