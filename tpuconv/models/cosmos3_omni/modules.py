"""Cosmos 3: the modules of Qwen3-VL, dense."""

from tpuconv.models.qwen3_vl import modules as qwen3_vl


class Model(qwen3_vl.Model):
    """Token ids [B, T] to logits [B, T, V]."""
