"""GLM-5.3-Flash, of which the text model is converted."""
