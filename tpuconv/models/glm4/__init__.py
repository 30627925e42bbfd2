"""GLM-4 of April 2025."""
