"""OLMo 3 (arXiv:2512.13961): the modules of OLMo 2, with windows and two kinds of rotary positions."""

from tpuconv.models.olmo2 import modules as olmo2


class Model(olmo2.Model):
    """Token ids [B, T] to logits [B, T, V]."""
