"""Laguna: gated attention, with other query heads in layers with a sliding window, and experts as DeepSeek V3's
(arXiv:2412.19437)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, soft_capped
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.laguna.family import Config
from tpuconv.notation.letters import with_letters


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately. The output has a gate for each head, or for each of its elements."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        heads, bias = "full_heads" if layer in config.layer_sets["full_layers"] else "N", config.attention_bias
        super().__init__(config, heads=heads, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        gates, self.gates_heads = "N" if config.gates_heads else "NH", config.gates_heads
        sizes = with_letters(config.sizes, {"N": heads})
        self.gate = Einsum(f"BTD,D{gates}->BT{gates}", sizes, dtype=dtype, keys=keys)

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        gate = nnx.softplus(self.gate(x_BTD).astype(jnp.float32)).astype(x_BTD.dtype)
        return y_BTNH * (gate[..., None] if self.gates_heads else gate)


class Router(deepseek_v3.Router):
    """DeepSeek V3's router, whose products are rounded to the dtype of x, and may have a soft limit."""

    def scores(self, x_BTD: jax.Array) -> jax.Array:
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, self.kernel[...]).astype(x_BTD.dtype)
        config: Any = self.config
        cap = config.moe_router_logit_softcapping or None
        return nnx.sigmoid(soft_capped(logits_BTE.astype(jnp.float32), cap))


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared one, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    moe_type = MoE

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return Attention(config, layer, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
