"""Hy3: the layers of dots.llm1, which are those of DeepSeek V3 (arXiv:2412.19437) but for their attention."""

from tpuconv.models.dots1 import modules as dots1


class Model(dots1.Model):
    """Token ids [B, T] to logits [B, T, V]."""
