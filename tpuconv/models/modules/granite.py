"""Granite with sinks, and with norms behind each part."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.layers import Keys, RMSNorm
from tpuconv.models.common.steps import Step
from tpuconv.models.gpt_oss.modules import attention_with_sinks


class SinkAttention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Each
    head has a score without a value."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.sinks = nnx.Param(jnp.zeros(config.sizes["N"], options["dtype"]))

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        q_BTNH, k_BTKH = self.positioned(self.q(x_BTD), self.k(x_BTD), step)
        kv = append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)
        y_BTNH = attention_with_sinks(q_BTNH, kv, step.visible(window), self.sinks[...], scale=self.scale)
        return self.o(y_BTNH), kv


class PostNormedBlock(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm and before another one, if there are these, with residual
    connections."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.post_attn_norm = self.post_norm(config, dtype)
        self.post_mlp_norm = self.post_norm(config, dtype)

    def post_norm(self, config: Any, dtype: DTypeLike) -> RMSNorm | None:
        """Returns a norm after a part; None in a model without."""
        return RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype) if config.use_post_norm else None

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = self.joined(x_BTD, y_BTD if self.post_attn_norm is None else self.post_attn_norm(y_BTD))
        y_BTD = self.mlp(self.mlp_norm(x_BTD))
        return self.joined(x_BTD, y_BTD if self.post_mlp_norm is None else self.post_mlp_norm(y_BTD)), kv
