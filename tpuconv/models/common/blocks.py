"""Attention, MLPs and layers that many families share. A family's class derives from one of these and overrides what
differs. `models/common/rows.py` has the rows of these parameters."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.layers import (
    Einsum,
    Keys,
    RMSNorm,
    apply_rope,
    apply_rope_to_neighbours,
    attention,
    gelu_tanh,
)
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. `scale`
    is the factor of scores, by default H^-0.5, and `cap` their soft limit. With `float32_rope` rotary positions are
    applied in float32, with `pairs` to adjacent dimensions. Biases belong to queries, keys and values, and to the
    output; `heads` is the letter or word of the number of query heads."""

    float32_rope: ClassVar[bool] = False
    pairs: ClassVar[bool] = False
    scale: float | None = None
    cap: float | None = None

    def __init__(
        self,
        config: DecoderConfig,
        *,
        heads: str = "N",
        bias: bool = False,
        out_bias: bool = False,
        dtype: DTypeLike,
        keys: Keys,
    ):
        sizes = with_letters(config.sizes, {"N": heads})
        self.q = Einsum("BTD,DNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=out_bias, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        if x_BTD.shape[1] > 1:
            # With a cache that is sharded over the batch, XLA would norm each chip's sequences and gather them for `q`.
            x_BTD = placed(x_BTD, "B T D")
        q_BTNH, k_BTKH = self.positioned(self.queries(x_BTD), self.k(x_BTD), step)
        kv = append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)
        return self.o(self.gated(x_BTD, self.attended(q_BTNH, kv, self.seen(step, window), step))), kv

    def seen(self, step: Step, window: jax.Array | int) -> jax.Array:
        """Returns the mask [B, T, S] of the keys that tokens see in a layer with this window."""
        return step.visible(window)

    def attended(self, q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array, step: Step) -> jax.Array:
        """Returns the output [B, T, N, H] of each head, of the keys and values that tokens see."""
        return attention(q_BTNH, kv, visible_BTS, scale=self.scale, cap=self.cap, bias_BNTS=self.score_bias(step))

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the queries [B, T, N, H] before they get rotary positions."""
        return self.q(x_BTD)

    def values(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the values [B, T, K, H]."""
        return self.v(x_BTD)

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Returns queries and keys with rotary positions."""
        cos_sin = step.cos_sin if self.float32_rope else step.cos_sin_in(q_BTNH.dtype)
        turn = apply_rope_to_neighbours if self.pairs else apply_rope
        return turn(q_BTNH, cos_sin), turn(k_BTKH, cos_sin)

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        """Returns the output [B, T, N, H] of each head, which gates made of `x_BTD`, or a norm, may change."""
        return y_BTNH

    def score_bias(self, step: Step) -> jax.Array | None:
        """Returns what is added to scores, [B, N, T, S] or the same for all tokens [B, N, 1, S]; None in families
        without."""
        return None


class JoinedAttention(Attention):
    """Attention that reads an embedding and a hidden state, [B, T, 2 D] to [B, T, D]."""

    def __init__(self, config: DecoderConfig, *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, {"j": "joined_width"})
        self.q = Einsum("BTj,jNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTj,jKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTj,jKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)


class NormedAttention(Attention):
    """Attention with queries and keys that are normalized before they get rotary positions: each head separately, or
    all heads together; with `norms_last` after they got them. In families where only some models have these norms,
    `normed` says whether this one does."""

    norm_type: ClassVar[Callable[..., Any]] = RMSNorm
    norms_last: ClassVar[bool] = False

    def __init__(
        self,
        config: DecoderConfig,
        *,
        heads: str = "N",
        bias: bool = False,
        out_bias: bool = False,
        all_heads: bool = False,
        normed: bool = True,
        dtype: DTypeLike,
        keys: Keys,
    ):
        super().__init__(config, heads=heads, bias=bias, out_bias=out_bias, dtype=dtype, keys=keys)
        if not normed:
            return
        queries, keys_ = ("NH", "KH") if all_heads else ("H", "H")
        self.q_norm = self.norm_type(queries, config.sizes, config.rms_norm_eps, dtype=dtype)
        self.k_norm = self.norm_type(keys_, config.sizes, config.rms_norm_eps, dtype=dtype)

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        if self.norms_last:
            return self.normalized(*super().positioned(q_BTNH, k_BTKH, step))
        return super().positioned(*self.normalized(q_BTNH, k_BTKH), step)

    def normalized(self, q_BTNH: jax.Array, k_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries and keys before they get rotary positions."""
        return (self.q_norm(q_BTNH), self.k_norm(k_BTKH)) if hasattr(self, "q_norm") else (q_BTNH, k_BTKH)


class ClippedAttention(NormedAttention):
    """Attention whose queries, keys and values are limited to between -`clip_qkv` and `clip_qkv` of config.json, if it
    has a number there: queries and keys after their norms, if they have any, and before they get rotary positions."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.limit = config.clip_qkv

    def values(self, x_BTD: jax.Array) -> jax.Array:
        return self._clipped(super().values(x_BTD))

    def normalized(self, q_BTNH: jax.Array, k_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
        q_BTNH, k_BTKH = super().normalized(q_BTNH, k_BTKH)
        return self._clipped(q_BTNH), self._clipped(k_BTKH)

    def _clipped(self, x: jax.Array) -> jax.Array:
        return x if self.limit is None else jnp.clip(x, -self.limit, self.limit)


class GatedMLP(nnx.Module):
    """Gated MLP (arXiv:2002.05202), x [B, T, D] to [B, T, D]. `width` is the letter or word of its width. Its
    activation is SiLU, or what a family overrides it with."""

    def __init__(self, config: DecoderConfig, width: str = "F", *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, {"F": width})
        self.gate = Einsum("BTD,DF->BTF", sizes, bias=bias, dtype=dtype, keys=keys)
        self.up = Einsum("BTD,DF->BTF", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Einsum("BTF,FD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(self.hidden(self.gate(x_BTD), self.up(x_BTD)))

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Returns the hidden states [B, T, F], from the products with both matrices."""
        return self.act(gate) * up

    def act(self, x_BTF: jax.Array) -> jax.Array:
        """Returns the gate [B, T, F] after its activation."""
        return nnx.silu(x_BTF)


class TanhMLP(GatedMLP):
    """Gated MLP whose activation is GELU, approximated by a tanh, x [B, T, D] to [B, T, D]."""

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu_tanh(x_BTF)


def clamped(gate: jax.Array, up: jax.Array, limit: float) -> jax.Array:
    """Returns silu(gate) * up, with gates of at most `limit`, and `up` between -limit and limit."""
    return nnx.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def shifted(gate: jax.Array, up: jax.Array, limit: float, alpha: float) -> jax.Array:
    """Returns (up + 1) gate sigmoid(alpha gate), with gates of at most `limit`, and `up` between -limit and limit: the
    hidden states of gpt-oss."""
    gate = jnp.minimum(gate, limit)
    return (jnp.clip(up, -limit, limit) + 1) * (gate * nnx.sigmoid(gate * alpha))


class ClampedMLP(GatedMLP):
    """Gated MLP whose hidden states have a limit, `swiglu_limit` of config.json, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, width: str = "F", *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, width, dtype=dtype, keys=keys)
        self.limit = config.swiglu_limit

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return clamped(gate, up, self.limit)


class PlainMLP(nnx.Module):
    """MLP without a gate, x [B, T, D] to [B, T, D]. `width` is the letter or word of its width. Its activation
    is the square of the positive part (arXiv:2109.08668), or what a family overrides it with."""

    def __init__(self, config: DecoderConfig, width: str = "F", *, bias: bool = False, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, {"F": width})
        self.up = Einsum("BTD,DF->BTF", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Einsum("BTF,FD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(self.act(self.up(x_BTD)))

    def act(self, x_BTF: jax.Array) -> jax.Array:
        """Returns the hidden activations [B, T, F]."""
        return jnp.square(nnx.relu(x_BTF))


class FedBlock(nnx.Module):
    """A layer with an MLP or experts.

    Attributes:
        attention_type, mlp_type, norm_type: the classes of the parts.
        moe_type: the class of experts; None in a family without. The layers J have them, or all where J is not given.
    """

    attention_type: ClassVar[Callable[..., Any]] = Attention
    mlp_type: ClassVar[Callable[..., Any]] = GatedMLP
    moe_type: ClassVar[Callable[..., Any] | None] = None
    norm_type: ClassVar[Callable[..., Any]] = RMSNorm

    def add_feed(self, config: DecoderConfig, layer: int, *, dtype: DTypeLike, keys: Keys) -> None:
        """Creates the experts or the MLP."""
        # The layer for multi-token prediction, after the model's own, has experts if others have.
        has_experts = layer in config.layer_sets.get("J", (layer,)) or layer >= config.num_hidden_layers
        if self.moe_type is not None and has_experts:
            self.moe = self.moe_type(config, dtype=dtype, keys=keys)
        else:
            self.mlp = self.mlp_type(config, dtype=dtype, keys=keys)

    def fed(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the output [B, T, D] of the MLP or of the experts."""
        feed: Any = self.moe if hasattr(self, "moe") else self.mlp
        y_BTD: jax.Array = feed(x_BTD)
        return y_BTD


class PreNormBlock(FedBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    def __init__(self, config: DecoderConfig, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = self.new_attention(config, layer, dtype=dtype, keys=keys)
        self.mlp_norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.add_feed(config, layer, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = self.joined(x_BTD, y_BTD)
        return self.joined(x_BTD, self.fed(self.mlp_norm(x_BTD))), kv

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        """Returns the attention of a layer."""
        return self.attention_type(config, dtype=dtype, keys=keys)

    def joined(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """Returns the hidden states with the output of a part."""
        return x_BTD + y_BTD


class MoeNormBlock(FedBlock):
    """One layer: attention and experts, each after a norm, with residual connections. The second norm is named after
    the experts."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = self.attention_type(config, dtype=dtype, keys=keys)
        self.moe_norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.add_feed(config, layer, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.fed(self.moe_norm(x_BTD)), kv


class ParallelBlock(nnx.Module):
    """One layer: attention and MLP, both after the same norm, with one residual connection."""

    attention_type: ClassVar[Callable[..., Any]] = Attention
    mlp_type: ClassVar[Callable[..., Any]] = GatedMLP
    norm_type: ClassVar[Callable[..., Any]] = RMSNorm

    def __init__(self, config: DecoderConfig, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = self.attention_type(config, dtype=dtype, keys=keys)
        self.mlp = self.mlp_type(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        normed_BTD = self.norm(x_BTD)
        y_BTD, kv = self.attn(normed_BTD, step, window, kv)
        return x_BTD + y_BTD + self.mlp(normed_BTD), kv


class SandwichBlock(PreNormBlock):
    """One layer: attention, then an MLP or experts, each between two norms, with residual connections."""

    def __init__(self, config: DecoderConfig, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.post_attn_norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.post_mlp_norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        return x_BTD + self.post_mlp_norm(self.fed(self.mlp_norm(x_BTD))), kv


class PostNormBlock(FedBlock):
    """One layer: attention, then an MLP or experts, each before a norm, with residual connections."""

    def __init__(self, config: DecoderConfig, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.attn = self.attention_type(config, dtype=dtype, keys=keys)
        self.post_attn_norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.add_feed(config, layer, dtype=dtype, keys=keys)
        self.post_mlp_norm = self.norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(x_BTD, step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        return x_BTD + self.post_mlp_norm(self.fed(x_BTD)), kv
