"""Fuyu (https://www.adept.ai/blog/fuyu-8b): the modules of Persimmon."""

from tpuconv.models.persimmon import modules as persimmon


class Model(persimmon.Model):
    """Token ids [B, T] to logits [B, T, V]."""
