"""GLM-4.5V and 4.6V, of which the text model is converted."""
