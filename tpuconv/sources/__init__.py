"""Where checkpoints come from: safetensors folders and the Hub."""
