"""XGLM (arXiv:2112.10668): GPT-2 with scaled embeddings, to which sines and cosines of positions are added."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import LayerNorm, times
from tpuconv.models.gpt2 import modules as gpt2
from tpuconv.models.gpt_neox.modules import MLP

FIRST_POSITION = 2
"""The position of the first token."""


def sinusoids(pos_BT: jax.Array, width: int) -> jax.Array:
    """Returns the sines, then the cosines [B, T, D] of the angles of positions (arXiv:1706.03762, section 3.5), with
    rates from 1 to 1/10000, in float32."""
    half = width // 2
    rates = np.exp(np.arange(half) * (-np.log(10000) / (half - 1))).astype(np.float32)
    angles = pos_BT[..., None].astype(jnp.float32) * rates
    sines = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(sines, ((0, 0), (0, 0), (0, width % 2)))


class Block(gpt2.Block):
    """One layer: attention and MLP, each after a layer norm, with residual connections."""

    mlp_type = MLP


class ScaledDecoder(Decoder):
    """A decoder whose embeddings may be multiplied by the root of their width; see `Decoder`."""

    config: Any

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return times(x_BTD, self.config.hidden_size**0.5) if self.config.scale_embedding else x_BTD


class Model(ScaledDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        return x_BTD + sinusoids(pos_BT + FIRST_POSITION, x_BTD.shape[-1]).astype(x_BTD.dtype)
