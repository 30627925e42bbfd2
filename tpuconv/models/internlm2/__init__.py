"""InternLM 2."""
