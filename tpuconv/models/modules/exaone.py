"""K-EXAONE's multi-token prediction."""

from typing import Any

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys
from tpuconv.models.common.mtp import JoinedLayer
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.steps import NO_WINDOW


class DenseBlock(blocks.PreNormBlock):
    """One layer: attention, then an MLP, each after a norm, with residual connections."""

    attention_type = blocks.NormedAttention


class MTPModule(JoinedLayer):
    """The module for multi-token prediction: the joined inputs and a layer with an MLP, and with the window of the
    model's first layer."""

    block = DenseBlock

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.window = config.windows[0] or NO_WINDOW


class DraftingDecoder(Decoder):
    """A decoder with this module."""

    mtp_type = MTPModule
    config: Any

    @property
    def mtp_rope(self) -> tuple[Rope | None, int]:
        """The rotary positions, which the module has even where layers that see all tokens have none."""
        return self.config.rope, self.config.sizes["H"]
