"""The format of our checkpoints: its manifest, its arrays, reading them."""
