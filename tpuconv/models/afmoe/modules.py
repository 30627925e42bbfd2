"""Trinity (AFMoE)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.afmoe.family import Config
from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, times
from tpuconv.models.deepseek_v3 import modules as deepseek_v3


class Attention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately. The output is gated."""

    norm_type = ScaledRMSNorm

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", config.axes, dtype=dtype, keys=keys)

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH * nnx.sigmoid(self.gate(x_BTD))


class Router(deepseek_v3.Router):
    """DeepSeek V3's router, whose products are rounded to the dtype of x."""

    def scores(self, x_BTD: jax.Array) -> jax.Array:
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, self.kernel[...]).astype(x_BTD.dtype)
        return nnx.sigmoid(logits_BTE.astype(jnp.float32))


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared ones, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(blocks.SandwichBlock):
    """One layer: attention, then an MLP or experts, each between two norms, with residual connections."""

    attention_type = Attention
    moe_type = MoE
    norm_type = ScaledRMSNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
    config: Config

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Multiplies the embeddings by sqrt(D), if `mup_enabled` is set. Returns [B, T, D]."""
        return times(x_BTD, self.config.hidden_size**0.5) if self.config.mup_enabled else x_BTD
