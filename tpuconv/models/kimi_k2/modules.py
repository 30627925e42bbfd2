"""Kimi K2 (arXiv:2507.20534): the modules of DeepSeek V3."""

from tpuconv.models.deepseek_v3 import modules as deepseek_v3


class Model(deepseek_v3.Model):
    """Token ids [B, T] to logits [B, T, V]."""
