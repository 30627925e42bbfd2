"""Qwen3-Omni, of which the text model of the thinker is converted."""
