"""StarCoder2."""
