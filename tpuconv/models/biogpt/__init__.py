"""BioGPT."""
