"""Qwen4-Exp: the modules of the text model."""

from tpuconv.models.qwen4_exp_text import modules as text


class Model(text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
