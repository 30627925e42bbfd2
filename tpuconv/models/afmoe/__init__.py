"""Trinity (AFMoE)."""
