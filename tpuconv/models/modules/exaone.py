"""K-EXAONE's multi-token prediction."""

from typing import Any

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.mtp import JoinedLayer
from tpuconv.models.common.rope import Rope


class DenseBlock(blocks.PreNormBlock):
    """One layer: attention, then an MLP, each after a norm, with residual connections."""

    attention_type = blocks.NormedAttention


class MTPModule(JoinedLayer):
    """The module for multi-token prediction: the joined inputs and a layer that sees all tokens, with an MLP."""

    block = DenseBlock


class DraftingDecoder(Decoder):
    """A decoder with this module."""

    mtp_type = MTPModule
    config: Any

    @property
    def mtp_rope(self) -> tuple[Rope | None, int]:
        """As of the layers that see all tokens: none if others have a window."""
        return None if self.config.sliding_window else self.config.rope, self.config.sizes["H"]
