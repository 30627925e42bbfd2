"""Step-3.7: the modules of Step-3.5."""

from tpuconv.models.step3p5 import modules as step3p5


class Model(step3p5.Model):
    """Token ids [B, T] to logits [B, T, V]."""
