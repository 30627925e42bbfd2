"""Gemma 2 (arXiv:2408.00118)."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import CenteredRMSNorm, Keys, apply_rope, attention, soft_capped
from tpuconv.models.gemma import modules as gemma
from tpuconv.models.gemma.modules import MLP
from tpuconv.models.gemma2.family import Config


class Attention(gemma.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Scores
    have a factor of their own, and are limited by a soft cap."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.scale, self.cap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        q_BTNH = apply_rope(self.q(x_BTD), cos_sin)
        kv = append_kv(kv, apply_rope(self.k(x_BTD), cos_sin), self.v(x_BTD), step.slot)
        return self.o(attention(q_BTNH, kv, step.visible(window), scale=self.scale, cap=self.cap)), kv


class Block(nnx.Module):
    """One layer: attention and MLP, each between two norms, with residual connections."""

    attention: ClassVar[Callable[..., Any]] = Attention

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = CenteredRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.attn = self.attention(config, dtype=dtype, keys=keys)
        self.post_attn_norm = CenteredRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.mlp_norm = CenteredRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype, keys=keys)
        self.post_mlp_norm = CenteredRMSNorm("D", config.axes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        return x_BTD + self.post_mlp_norm(self.mlp(self.mlp_norm(x_BTD))), kv


class Model(gemma.Model):
    """Token ids [B, T] to logits [B, T, V], which a soft cap limits."""

    block = Block
    config: Config

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        """Limits the logits [B, T, V] by a soft cap."""
        return soft_capped(logits_BTV, self.config.final_logit_softcapping)
