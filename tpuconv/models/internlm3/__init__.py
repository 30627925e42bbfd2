"""InternLM 3."""
