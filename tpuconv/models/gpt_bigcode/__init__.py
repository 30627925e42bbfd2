"""GPT-BigCode."""
