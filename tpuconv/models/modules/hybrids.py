"""Layers and decoders with Mamba-2."""

from tpuconv.models.common.mamba2 import Mamba2, MambaState
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder


class MambaBlock(HybridBlock):
    """One layer: attention or Mamba-2, then an MLP or experts, each after a norm, with residual connections."""

    mixer_type = Mamba2


class MambaDecoder(HybridDecoder):
    """A decoder with Mamba-2 in the layers l."""

    state_type = MambaState
