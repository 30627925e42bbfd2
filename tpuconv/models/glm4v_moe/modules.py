"""GLM-4.5V and 4.6V (arXiv:2507.01006): the modules of GLM-4.5. The three positions of a text token are equal, so that
its rotary positions are plain."""

from tpuconv.models.glm4_moe import modules as glm4_moe


class Model(glm4_moe.Model):
    """Token ids [B, T] to logits [B, T, V]."""
