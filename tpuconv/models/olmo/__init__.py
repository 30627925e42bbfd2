"""OLMo 1."""
