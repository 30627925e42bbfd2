"""Kimi K3."""
