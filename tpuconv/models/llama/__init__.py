"""Llama 2, 3, 3.1, 3.2, 3.3, SmolLM2 and Mistral."""
