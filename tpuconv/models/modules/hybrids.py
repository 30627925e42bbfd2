"""Layers and decoders with Mamba-2 or Mamba-1."""

from tpuconv.models.common.mamba1 import ChannelState, NormedMamba1
from tpuconv.models.common.mamba2 import Mamba2, MambaState
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder


class MambaBlock(HybridBlock):
    """One layer: attention or Mamba-2, then an MLP or experts, each after a norm, with residual connections."""

    mixer_type = Mamba2


class MambaDecoder(HybridDecoder):
    """A decoder with Mamba-2 in the layers l."""

    state_type = MambaState


class NormedMamba1Block(HybridBlock):
    """One layer: attention or Mamba-1 with norms, then an MLP or experts, each after a norm, with residual
    connections."""

    mixer_type = NormedMamba1


class Mamba1Hybrid(HybridDecoder):
    """A decoder with Mamba-1 in `state_layers`."""

    state_type = ChannelState
