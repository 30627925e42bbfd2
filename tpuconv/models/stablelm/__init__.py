"""StableLM 2 and 3B."""
