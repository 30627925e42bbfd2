"""GLM-4.7-Flash."""
