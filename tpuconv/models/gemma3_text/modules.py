"""Gemma 3 (arXiv:2503.19786), the text model."""

import jax
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Step
from tpuconv.models.common.layers import CenteredRMSNorm, Keys, apply_rope, attention
from tpuconv.models.gemma2 import modules as gemma2
from tpuconv.models.gemma3_text.family import Config


class Attention(gemma2.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Queries
    and keys are normalized, each head separately."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.q_norm = CenteredRMSNorm("H", config.axes, config.rms_norm_eps, dtype=dtype)
        self.k_norm = CenteredRMSNorm("H", config.axes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        q_BTNH = apply_rope(self.q_norm(self.q(x_BTD)), cos_sin)
        k_BTKH = apply_rope(self.k_norm(self.k(x_BTD)), cos_sin)
        kv = append_kv(kv, k_BTKH, self.v(x_BTD), step.slot)
        return self.o(attention(q_BTNH, kv, step.visible(window), scale=self.scale)), kv


class Block(gemma2.Block):
    """One layer: attention and MLP, each between two norms, with residual connections."""

    attention = Attention


class Model(gemma2.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
