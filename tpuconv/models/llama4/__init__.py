"""The text model of Llama 4."""
