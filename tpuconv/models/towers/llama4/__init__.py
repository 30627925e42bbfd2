"""The vision encoder of Llama 4."""
