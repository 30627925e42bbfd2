"""JetMoE."""
