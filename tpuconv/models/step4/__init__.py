"""Step-5 Preview, whose model type is step4."""
