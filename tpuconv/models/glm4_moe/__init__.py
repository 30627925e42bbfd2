"""GLM-4.5, GLM-4.6 and GLM-4.7."""
