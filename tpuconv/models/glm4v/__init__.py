"""GLM-4.1V, of which the text model is converted."""
