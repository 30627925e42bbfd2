"""Granite with sliding windows and sinks, mixture of experts."""

from tpuconv.models.granite_swa import modules as granite_swa
from tpuconv.models.granitemoe.modules import MoE


class Block(granite_swa.Block):
    """One layer: attention and experts, each after a norm, with residual connections and a factor of what they add."""

    moe_type = MoE


class Model(granite_swa.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
