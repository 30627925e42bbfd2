"""ZAYA1: attention with convolved queries and keys, and routers that read the router of the layer before.

Between layers the hidden states and the router's are one array [B, T, (D + r)] in float32, in this order.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, apply_rope, attention, gelu, normal
from tpuconv.models.common.logit_bias import BiasedLogits
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.recurrence import HybridDecoder, LayerState, PackedTokens
from tpuconv.models.common.steps import Step
from tpuconv.models.zaya.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {
    **{"c": "channel_taps", "h": "head_taps", "i": "head_inputs", "v": "half_values"},
    **{"r": "router_dim", "s": "router_inputs", "e": "router_choices"},
}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LastInputs(LayerState):
    """The last inputs of the convolutions of a layer, and the last token's products with the matrix of the values that
    the next token takes."""

    axes: ClassVar[tuple[str, ...]] = ("B taps N H", "B taps K H", "B half_values")

    q_BcNH: jax.Array
    k_BcKH: jax.Array
    v_Bv: jax.Array


class HeadProduct(Einsum):
    """The product of the channels of a head with a kernel of this head, x [B, T, N, h, i] to [B, T, N, H]. `heads` is
    the letter of the heads."""

    def __init__(self, heads: str, sizes: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(f"BT{heads}hi,{heads}hiH->BT{heads}H", sizes, bias=True, dtype=dtype, keys=keys)
        self.bias = nnx.Param(jnp.zeros((sizes[heads], sizes["H"]), dtype))  # not one for all heads


class HeadConvolution(nnx.Module):
    """Two causal convolutions of queries or keys x [B, T, N, H] along the tokens: of each channel, then of all channels
    of a head. `heads` is the letter of the heads; the last taps belong to the current token."""

    def __init__(self, heads: str, sizes: Any, *, dtype: DTypeLike, keys: Keys):
        shape = tuple(sizes[letter] for letter in f"{heads}H")
        self.channels = nnx.Param(normal(keys(), (*shape, sizes["c"]), dtype))
        self.channels_bias = nnx.Param(jnp.zeros(shape, dtype))
        self.heads = HeadProduct(heads, sizes, dtype=dtype, keys=keys)
        self.head_taps = sizes["h"]

    def __call__(self, x: jax.Array, last: jax.Array, length_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output [B, T, N, H], and the last inputs [B, c - 1, N, H] of the first `length_B` tokens, as
        `last` has them of the tokens before."""
        channels, tokens = self.channels[...].astype(jnp.float32), x.shape[1]
        inputs, between = jnp.concatenate([last, x.astype(jnp.float32)], axis=1), tokens + self.head_taps - 1
        lags = [inputs[:, tap : tap + between] * channels[..., tap] for tap in range(channels.shape[-1])]
        y = (sum(lags[1:], lags[0]) + self.channels_bias[...].astype(jnp.float32)).astype(x.dtype)
        out = self.heads(jnp.stack([y[:, tap : tap + tokens] for tap in range(self.head_taps)], axis=3))
        at_Bc = length_B[:, None] + jnp.arange(last.shape[1])
        return out, jnp.take_along_axis(inputs, at_Bc[..., None, None], axis=1)


def unit_heads(x: jax.Array) -> jax.Array:
    """Returns vectors (last axis) of the length H^0.5, in the dtype of x; vectors shorter than its epsilon stay
    shorter."""
    x_32, eps = x.astype(jnp.float32), float(jnp.finfo(x.dtype).eps)  # type: ignore[no-untyped-call]
    length = jnp.linalg.norm(x_32, axis=-1, keepdims=True)
    unit: jax.Array = (x_32 * (x.shape[-1] ** 0.5 / jnp.maximum(length, eps))).astype(x.dtype)
    return unit


class Attention(nnx.Module):
    """Compressed convolutional attention (arXiv:2510.04476), x [B, T, D] to [B, T, D]. Also returns the keys and values
    of all tokens so far, and the last inputs. Queries and keys are convolved; to both the mean of the query and of its
    key before is added. The second half of the values is made of the token before."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = with_letters(config.sizes, LEGEND), config.attention_bias
        self.q = Einsum("BTD,DNH->BTNH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,Dv->BTv", sizes, bias=bias, dtype=dtype, keys=keys)
        self.v_delayed = Einsum("BTD,Dv->BTv", sizes, bias=bias, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)
        self.q_conv = HeadConvolution("N", sizes, dtype=dtype, keys=keys)
        self.k_conv = HeadConvolution("K", sizes, dtype=dtype, keys=keys)
        self.k_scale = nnx.Param(jnp.ones(sizes["K"], dtype))

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None, last: LastInputs
    ) -> tuple[jax.Array, KV, LastInputs]:
        packed = PackedTokens.of(x_BTD, step)
        q_BTNH, k_BTKH = self.q(packed.x_BTD), self.k(packed.x_BTD)
        B, T, K, H = k_BTKH.shape
        mean_BTKGH = (q_BTNH.reshape(B, T, K, -1, H) + k_BTKH[:, :, :, None]) * 0.5
        q_BTNH, q_last = self.q_conv(q_BTNH, last.q_BcNH, packed.length_B)
        k_BTKH, k_last = self.k_conv(k_BTKH, last.k_BcKH, packed.length_B)
        q_BTNH = unit_heads(q_BTNH + mean_BTKGH.reshape(q_BTNH.shape))
        k_BTKH = unit_heads(k_BTKH + mean_BTKGH.mean(axis=3)) * self.k_scale[...][:, None]
        v_BTKH, v_last = self.values(packed, last.v_Bv)
        q_BTNH, k_BTKH, v_BTKH = (
            packed.unpacked(y.reshape(B, T, -1)).reshape(y.shape)
            for y in (q_BTNH, k_BTKH, v_BTKH.reshape(k_BTKH.shape))
        )
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        kv = append_kv(kv, apply_rope(k_BTKH, cos_sin), v_BTKH, step.slot)
        y_BTNH = attention(apply_rope(q_BTNH, cos_sin), kv, step.visible(window))
        return self.o(y_BTNH), kv, LastInputs(q_last, k_last, v_last)

    def values(self, packed: PackedTokens, last_Bv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the values [B, T, (K H)], and the products of the last token as `last_Bv` has them of the token
        before."""
        products_BTv = self.v_delayed.product(self.v_delayed.equation, packed.x_BTD)
        products_BTv = jnp.concatenate([last_Bv[:, None].astype(products_BTv.dtype), products_BTv], axis=1)
        last_B1v = jnp.take_along_axis(products_BTv, packed.length_B[:, None, None], axis=1)
        delayed_BTv = products_BTv[:, :-1]
        if self.v_delayed.bias is not None:
            delayed_BTv = delayed_BTv + self.v_delayed.bias[...]
        return jnp.concatenate([self.v(packed.x_BTD), delayed_BTv], axis=-1), last_B1v[:, 0].astype(jnp.float32)


class Router(nnx.Module):
    """x [B, T, D] and the hidden states [B, T, r] of the router before to the ids and weights [B, T, X] of each token's
    expert, and the hidden states of this one. The expert is the one with the highest probability and correction, the
    weight its probability; of the last choice, which is none, it is 0."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.down = Einsum("BTD,Dr->BTr", sizes, bias=True, dtype=dtype, keys=keys)
        if layer:
            self.scale = nnx.Param(jnp.ones(sizes["r"], dtype))
        self.norm = RMSNorm("r", sizes, config.rms_norm_eps, dtype=dtype)
        self.fc1 = Einsum("BTs,sr->BTr", sizes, bias=True, dtype=dtype, keys=keys)
        self.fc2 = Einsum("BTs,sr->BTr", sizes, bias=True, dtype=dtype, keys=keys)
        self.out = Einsum("BTr,re->BTe", sizes, dtype=dtype, keys=keys)
        self.correction = nnx.Param(jnp.zeros(sizes["e"], jnp.float32))
        self.experts = config.num_experts

    def __call__(self, x_BTD: jax.Array, before_BTr: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x_BTr = self.down(x_BTD)
        if hasattr(self, "scale"):
            x_BTr = x_BTr + before_BTr.astype(x_BTr.dtype) * self.scale[...]
        y_BTr = gelu(self.fc2(gelu(self.fc1(self.norm(x_BTr)))))
        probs_BTe = nnx.softmax(placed(self.out(y_BTr), "B T E"))
        wanted_BTe = probs_BTe.astype(jnp.float32) + self.correction[...].astype(jnp.float32)
        ids_BTX = jax.lax.top_k(wanted_BTe, 1)[1]
        weights_BTX = jnp.take_along_axis(probs_BTe, ids_BTX, axis=-1)
        is_none_BTX = ids_BTX == self.experts
        return jnp.where(is_none_BTX, 0, ids_BTX), jnp.where(is_none_BTX, 0, weights_BTX), x_BTr


class MoE(GatedExperts):
    """The chosen experts, x [B, T, D] and the hidden states [B, T, r] of the router before to [B, T, D] and the hidden
    states of this router."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, layer, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, before_BTr: jax.Array) -> tuple[jax.Array, jax.Array]:  # type: ignore[override]
        ids_BTX, weights_BTX, router_BTr = self.router(x_BTD, before_BTr)
        return super().__call__(x_BTD, ids_BTX, weights_BTX), router_BTr


class ScaledEntry(nnx.Module):
    """Embeddings [B, T, D] with a bias, then a factor, for each dimension."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(config.sizes["D"], dtype))
        self.bias = nnx.Param(jnp.zeros(config.sizes["D"], dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return (x_BTD + self.bias[...]) * self.scale[...]


class Join(ScaledEntry):
    """The sum of hidden states in float32 and of the output of a part, both [B, T, D] with a bias, then a factor, for
    each dimension."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        super().__init__(config, dtype=dtype)
        self.residual_scale = nnx.Param(jnp.ones(config.sizes["D"], dtype))
        self.residual_bias = nnx.Param(jnp.zeros(config.sizes["D"], dtype))

    def joined(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """Returns the sum."""
        residual_BTD = (x_BTD + self.residual_bias[...]) * self.residual_scale[...]
        return self(y_BTD) + residual_BTD


class Block(nnx.Module):
    """One layer: attention, then experts, each after a norm."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.config, self.dtype = config, dtype
        self.attn_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.attn_join = Join(config, dtype=dtype)
        self.mlp_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.moe = MoE(config, layer, dtype=dtype, keys=keys)
        self.mlp_join = Join(config, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        keys, last = kv or (None, LastInputs.empty(self.config, len(x_BTD)))
        x_BTD, before_BTr = jnp.split(x_BTD, [self.config.sizes["D"]], axis=-1)
        y_BTD, keys, last = self.attn(self.attn_norm(x_BTD.astype(self.dtype)), step, window, keys, last)
        x_BTD = self.attn_join.joined(x_BTD, y_BTD)
        y_BTD, router_BTr = self.moe(self.mlp_norm(x_BTD.astype(self.dtype)), before_BTr)
        x_BTD = self.mlp_join.joined(x_BTD, y_BTD)
        return jnp.concatenate([x_BTD, router_BTr.astype(x_BTD.dtype)], axis=-1), (keys, last)


class HiddenNorm(RMSNorm):
    """The last norm, of [B, T, (D + r)] to [B, T, D] in the dtype of the model."""

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        return super().__call__(x[..., : len(scale)].astype(scale.dtype))


class Model(BiasedLogits, HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = HiddenNorm
    state_type = LastInputs
    config: Config

    def __init__(self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, **options: Any):
        super().__init__(config, dtype=dtype, **options)
        self.entry = ScaledEntry(config, dtype=dtype)

    @property
    def input_modules(self) -> tuple[str, ...]:
        return ("entry",)

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S]."""
        return KV.empty(config, layer, shape, dtype), LastInputs.empty(config, *shape[:-1])

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Returns the hidden states, in float32, and zeros for a router before, [B, T, (D + r)]."""
        x_BTD = self.entry(x_BTD).astype(jnp.float32)
        return jnp.pad(x_BTD, ((0, 0), (0, 0), (0, self.config.sizes["router_dim"])))
