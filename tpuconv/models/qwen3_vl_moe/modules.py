"""Qwen3-VL with experts: the modules of Qwen3's. The three positions of a text token are equal, so that its rotary
positions are plain."""

from tpuconv.models.qwen3_moe import modules as qwen3_moe


class Model(qwen3_moe.Model):
    """Token ids [B, T] to logits [B, T, V]."""
