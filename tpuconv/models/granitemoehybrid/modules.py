"""Granite 4: Granite 3 with Mamba-2 in most layers."""

from jax.typing import DTypeLike

from tpuconv.models.common.blocks import GatedMLP
from tpuconv.models.common.layers import Keys
from tpuconv.models.common.mamba2 import Mamba2, MambaState
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder
from tpuconv.models.granite import modules as granite
from tpuconv.models.granitemoe.modules import MoE
from tpuconv.models.granitemoehybrid.family import Config


class MLP(GatedMLP):
    """Gated MLP of a model without experts, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, "W", dtype=dtype, keys=keys)


class Block(granite.Block, HybridBlock):
    """One layer: Mamba-2 or attention, then experts or an MLP, each after a norm, with residual connections and a
    factor of what they add."""

    mixer_type = Mamba2
    mlp_type = MLP
    moe_type = MoE


class Model(granite.Model, HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    state_type = MambaState
