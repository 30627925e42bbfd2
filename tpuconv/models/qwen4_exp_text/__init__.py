"""Qwen4-Exp, the text model."""
