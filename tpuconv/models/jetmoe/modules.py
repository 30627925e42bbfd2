"""JetMoE (arXiv:2404.07413)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, apply_rope, attention
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step
from tpuconv.models.jetmoe.family import Config

EPS_IN_LAYERS = 1e-6
"""The epsilon of the norms in layers, whatever config.json says."""


class Router(Einsum):
    """The X experts with the highest scores of each token, and the softmax of these scores."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)
        self.count = config.num_experts_per_tok

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:  # type: ignore[override]
        """Returns the weights [B, T, X] in the dtype of `x_BTD`, and the experts."""
        scores_BTE = placed(super().__call__(x_BTD), "B T E").astype(jnp.float32)
        scores_BTX, ids_BTX = jax.lax.top_k(scores_BTE, self.count)
        return nnx.softmax(scores_BTX).astype(x_BTD.dtype), ids_BTX


class Attention(nnx.Module):
    """Attention of experts, x [B, T, D] to [B, T, D]: each has a query head for each key head, and an output matrix;
    the keys and values are shared by all experts. Also returns the keys and values of all tokens so far. The queries of
    all experts are computed, and those of the token's own attend: experts are few, and products of matrices are
    fast."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.router = Router(config, dtype=dtype, keys=keys)
        self.q = Einsum("BTD,EDKH->BTEKH", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, dtype=dtype, keys=keys)
        self.o = Einsum("BTEKH,EKHD->BTD", sizes, dtype=dtype, keys=keys)
        self.bias = nnx.Param(jnp.zeros(sizes["D"], dtype))

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        weights_BTX, ids_BTX = self.router(x_BTD)
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        q_BTEKH = self.q(x_BTD)
        B, T, E, K, H = q_BTEKH.shape
        q_BTXKH = jnp.take_along_axis(q_BTEKH, ids_BTX[..., None, None], axis=2)
        q_BTNH = apply_rope(q_BTXKH.swapaxes(2, 3).reshape(B, T, -1, H), cos_sin)  # N = (K X)
        kv = append_kv(kv, apply_rope(self.k(x_BTD), cos_sin), self.v(x_BTD), step.slot)
        y_BTKXH = attention(q_BTNH, kv, step.visible(window)).reshape(B, T, K, -1, H)
        chosen_BTXE = jax.nn.one_hot(ids_BTX, E, dtype=x_BTD.dtype) * weights_BTX[..., None]
        y_BTEKH = jnp.einsum("BTKXH,BTXE->BTEKH", y_BTKXH, chosen_BTXE)
        return self.o(y_BTEKH) + self.bias[...], kv


class MoE(GatedExperts):
    """The X experts with the highest scores of each token, x [B, T, D] to [B, T, D], and a bias."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)
        self.bias = nnx.Param(jnp.zeros(config.sizes["D"], dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        weights_BTX, ids_BTX = self.router(x_BTD)
        return super().__call__(x_BTD, ids_BTX, weights_BTX) + self.bias[...]


def norm(letters: str, sizes: Any, eps: float, *, dtype: DTypeLike) -> RMSNorm:
    """Returns a norm of a layer."""
    return RMSNorm(letters, sizes, EPS_IN_LAYERS, dtype=dtype)


class Block(blocks.PreNormBlock):
    """One layer: attention and experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE
    norm_type = staticmethod(norm)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
