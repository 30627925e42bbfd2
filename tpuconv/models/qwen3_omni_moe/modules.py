"""Qwen3-Omni (arXiv:2509.17765): the modules of Qwen3's mixture of experts. The three positions of a text token are
equal, so that its rotary positions are plain."""

from tpuconv.models.qwen3_moe import modules as qwen3_moe


class Model(qwen3_moe.Model):
    """Token ids [B, T] to logits [B, T, V]."""
