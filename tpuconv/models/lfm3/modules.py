"""LFM3: short convolutions and attention, as LFM2 (arXiv:2511.23404), with norms after each part and gates of heads."""

from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import NormedAttention
from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm
from tpuconv.models.lfm2 import modules as lfm2
from tpuconv.models.lfm3.family import Config


class Attention(NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately. The output of each head may have a gate."""

    float32_rope = True

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        super().__init__(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DN->BTN", config.axes, dtype=dtype, keys=keys) if config.use_attention_gate else None

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return y_BTNH if self.gate is None else y_BTNH * nnx.sigmoid(self.gate(x_BTD))[..., None]


class Block(lfm2.Block):
    """One layer: a short convolution or attention, then an MLP, each after a norm and, if there are these, before
    another one, with residual connections."""

    attention_type: ClassVar[Any] = Attention

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        if config.use_sandwich_norm:
            self.post_attn_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
            self.post_mlp_norm = RMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        if not hasattr(self, "post_mlp_norm"):
            return super().__call__(x_BTD, step, window, kv)
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        return x_BTD + self.post_mlp_norm(self.fed(self.mlp_norm(x_BTD))), kv


class Model(lfm2.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
