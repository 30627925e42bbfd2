"""DiffusionGemma."""
