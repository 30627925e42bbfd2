"""Bamba: Llama with Mamba-2 in most layers."""

from tpuconv.models.common.mamba2 import Mamba2, MambaState
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder
from tpuconv.models.llama.modules import MLP, Attention


class Block(HybridBlock):
    """One layer: Mamba-2 or attention, then an MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP
    mixer_type = Mamba2


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    state_type = MambaState
