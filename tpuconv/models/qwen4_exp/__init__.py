"""Qwen4-Exp, of which the text model is converted."""
