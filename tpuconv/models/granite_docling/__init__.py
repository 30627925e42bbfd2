"""Granite for Docling, the text model."""
