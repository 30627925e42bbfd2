"""GLM-4.1V (arXiv:2507.01006): the modules of GLM-4 of April 2025. The three positions of a text token are equal, so
that its rotary positions are plain."""

from tpuconv.models.glm4 import modules as glm4


class Model(glm4.Model):
    """Token ids [B, T] to logits [B, T, V]."""
