"""The search for a config that fits a budget of bits."""
