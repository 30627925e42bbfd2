"""Cohere: Command R and R+."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.cohere.family import Config
from tpuconv.models.cohere2 import modules as cohere2
from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import Keys, LayerNorm, normalize


class HeadLayerNorm(LayerNorm):
    """Layer norm of each head, whose scale has other values for each head: x [B, T, N, H] to [B, T, N, H]."""

    def __call__(self, x: jax.Array) -> jax.Array:
        centered = x.astype("float32")
        centered -= centered.mean(axis=-1, keepdims=True)
        return (normalize(centered, 1, self.eps) * self.stretch().astype("float32")).astype(x.dtype)


class Attention(cohere2.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. The
    larger models normalize queries and keys, each head separately."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)  # type: ignore[arg-type]
        sizes, eps, normed = config.axes, config.rms_norm_eps, config.use_qk_norm
        self.q_norm = HeadLayerNorm("NH", sizes, eps, bias=False, dtype=dtype) if normed else None
        self.k_norm = HeadLayerNorm("KH", sizes, eps, bias=False, dtype=dtype) if normed else None

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        if self.q_norm is not None and self.k_norm is not None:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        return super().positioned(q_BTNH, k_BTKH, step)


class Block(cohere2.Block):
    """One layer: attention and MLP, both after the same norm, with one residual connection."""

    attention_type = Attention


class Model(cohere2.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
