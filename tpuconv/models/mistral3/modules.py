"""Mistral Small 3.1 and later, Ministral 3: the modules of the text model."""

from tpuconv.models.ministral3 import modules as ministral3


class Model(ministral3.Model):
    """Token ids [B, T] to logits [B, T, V]."""
