"""Muse Glimmer."""
