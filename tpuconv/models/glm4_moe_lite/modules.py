"""GLM-4.7-Flash (arXiv:2508.06471): the modules of DeepSeek V3."""

from tpuconv.models.deepseek_v3 import modules as deepseek_v3


class Model(deepseek_v3.Model):
    """Token ids [B, T] to logits [B, T, V]."""
