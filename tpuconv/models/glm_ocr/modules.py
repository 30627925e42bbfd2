"""GLM-OCR: the modules of GLM-4.1V."""

from tpuconv.models.glm4v import modules as glm4v


class Model(glm4v.Model):
    """Token ids [B, T] to logits [B, T, V]."""
