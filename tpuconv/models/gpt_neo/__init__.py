"""GPT-J."""
