"""Hunyuan-VL (arXiv:2511.19575): the modules of Hunyuan, dense. All positions of a text token are equal, so that its
rotary positions are plain."""

from tpuconv.models.hunyuan_v1_dense import modules as hunyuan_v1_dense


class Model(hunyuan_v1_dense.Model):
    """Token ids [B, T] to logits [B, T, V]."""
