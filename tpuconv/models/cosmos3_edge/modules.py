"""Cosmos 3 Edge: the modules of Arcee. The three positions of a text token are equal, so that its rotary positions are
plain."""

from tpuconv.models.arcee import modules as arcee


class Model(arcee.Model):
    """Token ids [B, T] to logits [B, T, V]."""
