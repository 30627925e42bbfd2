"""Qwen2.5-Omni, of which the text model of the thinker is converted."""
