"""OLMo Hybrid: the gated delta rule with factors of up to 2 in three of four layers, else the attention of OLMo 3."""

from typing import Any

import jax
from jax.typing import DTypeLike

from tpuconv.models.build import attention_class
from tpuconv.models.common.blocks import GatedMLP, PostNormBlock, PreNormBlock
from tpuconv.models.common.delta import LEGEND, DeltaNet, DeltaState
from tpuconv.models.common.layers import Keys, RMSNorm, ScaledRMSNorm
from tpuconv.models.common.recurrence import HybridDecoder
from tpuconv.models.olmo_hybrid.family import Config
from tpuconv.models.parts import Attn
from tpuconv.notation.letters import with_letters

DELTA_EPS = 1e-5
"""Epsilon of the norm after linear attention. config.json has only the epsilon of other norms."""


class Delta(DeltaNet):
    """Linear attention in which a token may change the state's value for its key to the opposite."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.norm = RMSNorm("w", with_letters(config.sizes, LEGEND), DELTA_EPS, dtype=dtype)
        self.factor = 2.0 if config.linear_allow_neg_eigval else 1.0

    def strengths(self, x_BTD: jax.Array) -> jax.Array:
        return super().strengths(x_BTD) * self.factor


class LinearBlock(PreNormBlock):
    """One layer: linear attention and an MLP, each after a norm, with residual connections."""

    attention_type = Delta
    mlp_type = GatedMLP
    norm_type = ScaledRMSNorm


class FullBlock(PostNormBlock):
    """One layer: attention and an MLP, each before a norm, with residual connections."""

    attention_type = attention_class(Attn("attention_bias", norms="all heads", rope="halves in float32"), ScaledRMSNorm)
    norm_type = ScaledRMSNorm


def new_block(config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
    """Returns a layer."""
    kind = LinearBlock if layer in config.layer_sets["state_layers"] else FullBlock
    return kind(config, layer, dtype=dtype, keys=keys)


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = staticmethod(new_block)
    norm_type = ScaledRMSNorm
    state_type = DeltaState
