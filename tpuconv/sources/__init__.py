"""The sources of checkpoints: safetensors folders and the Hub."""
