"""Granite for Docling: the modules of Granite 3, dense."""

from tpuconv.models.granite import modules as granite


class Model(granite.Model):
    """Token ids [B, T] to logits [B, T, V]."""
