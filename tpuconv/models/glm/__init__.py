"""GLM-4 of 2024 in the form of transformers."""
