"""Llama 4, its text model on its own."""
