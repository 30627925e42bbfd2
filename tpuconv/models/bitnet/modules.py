"""BitNet b1.58 (arXiv:2504.12285): Llama with norms before the last matrix of attention and of the MLP."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.bitnet.family import Config
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, RMSNorm


class Attention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D], with a norm of all heads together before the last matrix.
    Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)
        self.sub_norm = RMSNorm("NH", config.axes, config.rms_norm_eps, dtype=dtype)

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return self.sub_norm(y_BTNH)


class MLP(blocks.GatedMLP):
    """Gated MLP, x [B, T, D] to [B, T, D], with a norm before the last matrix."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.sub_norm = RMSNorm("F", config.axes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(self.sub_norm(self.act(self.gate(x_BTD)) * self.up(x_BTD)))

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return jnp.square(nnx.relu(x_BTF))


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mlp_type = MLP


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
