"""OPT (arXiv:2205.01068)."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Keys, LayerNorm
from tpuconv.models.common.positions import PositionedDecoder
from tpuconv.models.opt.family import Config


class Attention(blocks.Attention):
    """Attention without rotary positions, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so
    far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.enable_bias, out_bias=config.enable_bias, dtype=dtype, keys=keys)


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.enable_bias, dtype=dtype, keys=keys)
        self.activation = config.activation_function

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return nnx.relu(x_BTF) if self.activation == "relu" else nnx.gelu(x_BTF, approximate=False)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP
    norm_type = LayerNorm


class Model(PositionedDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
