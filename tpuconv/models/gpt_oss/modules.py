"""gpt-oss (arXiv:2508.10925)."""

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.sinks import SinkAttention
from tpuconv.models.gpt_oss.family import Config


class Attention(SinkAttention):
    """Attention whose biases `attention_bias` of config.json says."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)


class MoE(GatedExperts):
    """The X experts with the highest scores of each token, x [B, T, D] to [B, T, D]. Their weights are the softmax of
    these X scores. Gate and up of an expert are clamped; the hidden state is (1 + up) gate sigmoid(alpha gate)."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, bias=True, dtype=dtype, keys=keys)
        self.config = config
        self.router = Einsum("BTD,DE->BTE", config.sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        scores_BTX, ids_BTX = jax.lax.top_k(placed(self.router(x_BTD), "B T E"), self.config.num_experts_per_tok)
        return super().__call__(x_BTD, ids_BTX, nnx.softmax(scores_BTX))

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return blocks.shifted(gate, up, self.config.swiglu_limit, self.config.swiglu_alpha)


class Block(blocks.MoeNormBlock):
    """One layer: attention and experts, each after a norm, with residual connections."""

    attention_type = Attention
    moe_type = MoE
    norm_type = ScaledRMSNorm


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = ScaledRMSNorm
