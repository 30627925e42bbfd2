"""Mixtral (arXiv:2401.04088)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import Attention
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm
from tpuconv.models.common.moe import Experts
from tpuconv.models.common.placement import placed
from tpuconv.models.mixtral.family import Config


class MoE(Experts):
    """The X most probable experts of each token, x [B, T, D] to [B, T, D]. Their weights are normalized probabilities
    in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.axes, nnx.silu, dtype=dtype, keys=keys)
        self.chosen = config.num_experts_per_tok
        self.router = Einsum("BTD,DE->BTE", config.axes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        probs_BTE = nnx.softmax(placed(self.router(x_BTD), "B T E").astype(jnp.float32))
        weights_BTX, ids_BTX = jax.lax.top_k(probs_BTE, self.chosen)
        return super().__call__(x_BTD, ids_BTX, weights_BTX / weights_BTX.sum(axis=-1, keepdims=True))


class Block(nnx.Module):
    """One layer: attention and experts, each after a norm, with residual connections."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.moe_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.moe = MoE(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.moe(self.moe_norm(x_BTD)), kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
