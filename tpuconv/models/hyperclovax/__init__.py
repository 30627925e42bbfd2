"""HyperCLOVA X SEED."""
