"""K-EXAONE: attention as EXAONE 4 (arXiv:2507.11407), experts as DeepSeek V3 (arXiv:2412.19437)."""

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.mtp import JoinedLayer
from tpuconv.models.common.rope import Rope
from tpuconv.models.deepseek_v3.modules import MoE
from tpuconv.models.exaone_moe.family import Config


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type = blocks.NormedAttention
    moe_type = MoE


class DenseBlock(blocks.PreNormBlock):
    """One layer: attention, then an MLP, each after a norm, with residual connections."""

    attention_type = blocks.NormedAttention


class MTPModule(JoinedLayer):
    """The module for multi-token prediction: the joined inputs and a layer that sees all tokens, with an MLP."""

    block = DenseBlock


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = MTPModule
    config: Config

    @property
    def mtp_rope(self) -> tuple[Rope | None, int]:
        """As of the layers that see all tokens: none if others have a window."""
        return None if self.config.sliding_window else self.config.rope, self.config.axes["H"]
