"""GPT-Neo."""
