"""GLM-4.6V-Flash, the text model."""
