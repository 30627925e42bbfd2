"""Kimi Linear (arXiv:2510.26692): Kimi delta attention, and latent attention without rotary positions."""

from typing import Any, ClassVar

from jax.typing import DTypeLike

from tpuconv.models.common.kda import KDAState, KimiDelta
from tpuconv.models.common.recurrence import HybridBlock, HybridDecoder
from tpuconv.models.deepseek_v3.modules import Attention, Latent, MoE
from tpuconv.models.kimi_linear.family import Config


class Block(HybridBlock):
    """One layer: linear or latent attention, then experts or an MLP, each after a norm, with residual connections."""

    attention_type: ClassVar[Any] = Attention
    mixer_type = KimiDelta
    moe_type: ClassVar[Any] = MoE


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    state_type: ClassVar[Any] = KDAState

    def cached_keys(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        return Latent.empty(config, layer, shape, dtype)
