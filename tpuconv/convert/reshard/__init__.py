"""Resharding: a checkpoint with the same values, in chunks for another mesh, and with layers stacked or apart."""
