"""Llama 4's text model, saved by itself or in its wrapper."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import GatedMLP, PreNormBlock
from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Keys, apply_rope, attention, deinterleave, normalize
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step
from tpuconv.models.llama4_text.family import Config


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Most
    layers have rotary positions, and their tokens see their own chunk. The others have no rotary positions and see all
    tokens."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.sizes, config.attention_bias
        self.config = config
        self.has_rope = config.has_rope(layer)
        self.chunk = config.attention_chunk_size if config.is_chunked(layer) else None
        self.q = Einsum("BTD,DNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        q_BTNH, k_BTKH = self.q(x_BTD), self.k(x_BTD)
        if self.has_rope:
            q_BTNH, k_BTKH = self._rotated(q_BTNH, step), self._rotated(k_BTKH, step)
        elif self.config.attn_temperature_tuning:
            q_BTNH = (q_BTNH * self._temperature(step.pos_BT)[:, :, None, None]).astype(q_BTNH.dtype)
        kv = append_kv(kv, k_BTKH, self.v(x_BTD), step.slot)
        visible_BTS = step.visible(window)
        if self.chunk is not None:
            visible_BTS &= step.pos_BT[:, :, None] // self.chunk == step.pos_BS[:, None, :] // self.chunk
        return self.o(attention(q_BTNH, kv, visible_BTS)), kv

    def _rotated(self, x_BTNH: jax.Array, step: Step) -> jax.Array:
        """Applies rotary positions in float32, then an RMS norm without weights to each head. Returns [B, T, N, H]."""
        x_BTNH = apply_rope(deinterleave(x_BTNH), step.cos_sin)
        if not self.config.use_qk_norm:
            return x_BTNH
        return normalize(x_BTNH, 1, self.config.rms_norm_eps).astype(x_BTNH.dtype)

    def _temperature(self, pos_BT: jax.Array) -> jax.Array:
        """Factors [B, T] of the queries, which grow with the logarithm of the position (arXiv:2501.19399): with many
        keys, attention would spread over too many of them."""
        floor = jnp.floor((pos_BT.astype(jnp.float32) + 1) / self.config.floor_scale)
        return jnp.log1p(floor) * self.config.attn_scale + 1


class MoE(GatedExperts):
    """The X chosen experts and the shared expert, x [B, T, D] to [B, T, D]. An expert's weight scales its input instead
    of its output."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.chosen = config.num_experts_per_tok
        self.router = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)
        self.shared = GatedMLP(config, "M", dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        B, T, D = x_BTD.shape
        scores_BTX, ids_BTX = jax.lax.top_k(placed(self.router(x_BTD), "B T E"), self.chosen)
        weights_BTX = nnx.sigmoid(scores_BTX.astype(jnp.float32)).astype(x_BTD.dtype)
        # The X experts of a token have different inputs: pass X tokens with one expert each (U = T X).
        x_BUD = (x_BTD[:, :, None] * weights_BTX[..., None]).reshape(B, T * self.chosen, D)
        ids_BU1 = ids_BTX.reshape(B, T * self.chosen, 1)
        y_BUD = super().__call__(x_BUD, ids_BU1, jnp.ones(ids_BU1.shape, jnp.float32))
        return self.shared(x_BTD) + y_BUD.reshape(B, T, self.chosen, D).sum(axis=2)


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    moe_type: ClassVar[Callable[..., Any]] = MoE

    def new_attention(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> Attention:
        return Attention(config, layer, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
