"""nanochat."""
