"""Falcon (arXiv:2311.16867)."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.alibi import alibi_slopes
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, LayerNorm, gelu
from tpuconv.models.common.steps import Step
from tpuconv.models.falcon.family import Config
from tpuconv.models.modules.gpt import SummedBlock


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D], perhaps biased by distance. Also returns the keys and values
    of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)
        self.heads = config.num_attention_heads if config.alibi else 0
        self.factor: float = config.sizes["H"] ** -0.5

    def score_bias(self, step: Step) -> jax.Array | None:
        """Slopes, positions and their products are rounded to bfloat16, as in training, and have the factor that the
        products of queries and keys have."""
        if not self.heads:
            return None
        slopes_N, pos_BS = jnp.asarray(alibi_slopes(self.heads)), step.pos_BS.astype(jnp.float32)
        return in_bfloat16(in_bfloat16(slopes_N)[:, None, None] * in_bfloat16(pos_BS)[:, None, None, :]) * self.factor


def in_bfloat16(x: jax.Array) -> jax.Array:
    """Returns x, rounded to what bfloat16 has, in float32. The compiler may leave out a cast there and back."""
    rounded: jax.Array = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    return rounded


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, dtype=dtype, keys=keys)

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu(x_BTF)


class OneNormBlock(blocks.ParallelBlock):
    """One layer: attention and MLP, both after the same norm, with one residual connection."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = LayerNorm


class TwoNormBlock(SummedBlock):
    """One layer: attention and MLP, each after a norm of its own, one after the other or side by side."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = LayerNorm


def new_block(config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> OneNormBlock | TwoNormBlock:
    """Returns a layer."""
    block = OneNormBlock if config.one_norm else TwoNormBlock
    return block(config, layer, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = staticmethod(new_block)
    norm_type = LayerNorm
