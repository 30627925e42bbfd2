"""Qwen3.5 with experts, the text model: Qwen3-Next with other sizes."""

from tpuconv.models.qwen3_next import modules as qwen3_next


class Model(qwen3_next.Model):
    """Token ids [B, T] to logits [B, T, V]."""
