"""Qwen1.5 and Qwen2, mixture of experts (arXiv:2407.10671)."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.qwen2_moe.family import Config
from tpuconv.models.qwen3_moe import modules as qwen3_moe


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.qkv_bias, dtype=dtype, keys=keys)


class MoE(qwen3_moe.MoE):
    """The chosen experts and a shared one, x [B, T, D] to [B, T, D]. A sigmoid of the token weights the shared expert.
    The experts' weights are their probabilities, which are normalized if `norm_topk_prob` is set."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.shared = blocks.GatedMLP(config, "W", dtype=dtype, keys=keys)
        self.router_shared = Einsum("BTD,D->BT", config.axes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        weight_BT = nnx.sigmoid(self.router_shared(x_BTD))
        return super().__call__(x_BTD) + weight_BT[..., None] * self.shared(x_BTD)


class Block(blocks.PreNormBlock):
    """One layer: attention, then experts or an MLP, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
