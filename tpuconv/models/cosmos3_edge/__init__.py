"""Cosmos 3 Edge, of which the text model is converted."""
