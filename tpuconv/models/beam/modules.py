"""Beam: gated attention, norms before and after each part, experts as DeepSeek V3's (arXiv:2412.19437), and residuals
whose factors depend on the depth."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.beam.family import Config
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, apply_rope, soft_capped, times
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3.modules import MoE

GROWTH, CONTEXT = 0.1, 2048
"""Queries of layers without rotary positions grow as this power of their position, from this context on."""


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately. They have rotary positions, or queries grow with their position. Each
    element of the output has a gate."""

    norm_type = ScaledRMSNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", config.sizes, dtype=dtype, keys=keys)
        self.gate_bias = nnx.Param(jnp.zeros(config.sizes["N"], dtype))
        self.has_rope = config.ropes[layer] is not None

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD) + self.gate_bias[...][:, None])

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        if self.has_rope:
            return apply_rope(q_BTNH, step.cos_sin), apply_rope(k_BTKH, step.cos_sin)
        position_BT = (step.pos_BT.astype(jnp.float32) + 1) / CONTEXT
        growth_BT11 = jnp.exp(GROWTH * jnp.log1p(position_BT))[..., None, None]
        return (q_BTNH.astype(jnp.float32) * growth_BT11).astype(q_BTNH.dtype), k_BTKH


class Block(blocks.SandwichBlock):
    """One layer: attention, then an MLP or experts, each between two norms, with residual connections. The sum of the
    k-th part and of all before it is divided by sqrt(k), the embeddings being the first."""

    moe_type = MoE
    norm_type = ScaledRMSNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.part = 2 * (layer + 1)

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return Attention(config, layer, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = averaged(x_BTD, self.post_attn_norm(y_BTD), self.part)
        return averaged(x_BTD, self.post_mlp_norm(self.fed(self.mlp_norm(x_BTD))), self.part + 1), kv


def averaged(x_BTD: jax.Array, y_BTD: jax.Array, part: int) -> jax.Array:
    """Returns the hidden states [B, T, D] with the output of the `part`-th part."""
    return times(y_BTD, part**-0.5) + times(x_BTD, ((part - 1) / part) ** 0.5)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V], which have a soft limit."""

    block = Block
    norm_type = ScaledRMSNorm
    config: Config

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        return soft_capped(logits_BTV.astype(jnp.float32), self.config.final_logit_softcapping)
