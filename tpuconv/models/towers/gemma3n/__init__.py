"""The projectors of Gemma 3n, and its audio encoder."""
