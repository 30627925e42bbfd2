"""Step-3.5 (arXiv:2602.10604)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.deepseek_v3.modules import Router
from tpuconv.models.step3p5.family import Config
from tpuconv.notation.letters import with_letters


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately, and the output of each head has a gate. Layers with a sliding window
    have another number of query heads."""

    norm_type = CenteredRMSNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        heads = "N" if layer in config.layer_sets["window_layers"] else "full_heads"
        super().__init__(config, heads=heads, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DN->BTN", with_letters(config.sizes, {"N": heads}), dtype=dtype, keys=keys)
        scalar = config.query_pre_attn_scalar
        self.scale = None if scalar is None else scalar**-0.5

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD).astype(jnp.float32)).astype(x_BTD.dtype)[..., None]


def limited(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Returns silu(gate), at most `limit`, times `up` between -limit and limit."""
    return jnp.minimum(nnx.silu(gate), limit) * jnp.clip(up, -limit, limit)


class MLP(blocks.GatedMLP):
    """Gated MLP (arXiv:2002.05202), x [B, T, D] to [B, T, D], with limits of some layers."""

    limit = math.inf

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return limited(gate, up, self.limit)


class MoE(GatedExperts):
    """The chosen experts and the shared one, x [B, T, D] to [B, T, D], with limits of some layers."""

    limit = math.inf

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)  # type: ignore[arg-type]
        self.shared = MLP(config, "W", dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        return super().__call__(x_BTD, *self.router(x_BTD)) + self.shared(x_BTD)

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return limited(gate, up, self.limit)


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    mlp_type = MLP
    moe_type = MoE
    norm_type = CenteredRMSNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        experts, shared = (math.inf if limit is None else limit for limit in config.limits[layer])
        if hasattr(self, "moe"):
            self.moe.limit, self.moe.shared.limit = experts, shared
        else:
            self.mlp.limit = shared

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return Attention(config, layer, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = CenteredRMSNorm
