"""Qwen3.5 with experts: the modules of the text model."""

from tpuconv.models.qwen3_5_moe_text import modules as text


class Model(text.Model):
    """Token ids [B, T] to logits [B, T, V]."""
