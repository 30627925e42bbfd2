"""Ling 2 and Ring 2 (arXiv:2510.22115): the modules of GLM-4.5, with norms of queries and keys."""

from tpuconv.models.glm4_moe import modules as glm4_moe


class Model(glm4_moe.Model):
    """Token ids [B, T] to logits [B, T, V]."""
