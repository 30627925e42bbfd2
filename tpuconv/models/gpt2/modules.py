"""GPT-2 (https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)."""

from collections.abc import Callable
from typing import Any, ClassVar

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.gpt import UnrotatedConfig
from tpuconv.models.common.layers import Keys, LayerNorm
from tpuconv.models.common.positions import PositionedDecoder
from tpuconv.models.phi.modules import MLP


class Attention(blocks.Attention):
    """Attention without rotary positions, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so
    far."""

    def __init__(self, config: UnrotatedConfig, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=True, out_bias=True, dtype=dtype, keys=keys)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    attention_type: ClassVar[Callable[..., Any]] = Attention
    mlp_type: ClassVar[Callable[..., Any]] = MLP
    norm_type = LayerNorm


class Model(PositionedDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
