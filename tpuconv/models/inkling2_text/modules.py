"""Inkling 2: layers that read the outputs of blocks of layers; attention with learned relative positions, gates and
sinks.

Between layers the hidden states and the outputs of blocks are one array [B, T, (r D)], in this order.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, append_kv
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, exact_product, normalize, soft_capped
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.recurrence import PackedTokens, exact_einsum
from tpuconv.models.common.relative import (
    ConvolutionStates,
    RelativePositions,
    ResidualConvolution,
    attention_with_bias,
    temperature,
)
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import with_stream
from tpuconv.models.inkling2_text.family import MixedBlocksConfig
from tpuconv.models.inkling_text.modules import ConvolvedDecoder
from tpuconv.notation.letters import with_letters

LEGEND = {"c": "taps", "q": "streams_read"}
"""The words of this module, by the letters of its einsums and arrays."""


class BlockAttention(nnx.Module):
    """Attention of each token to the outputs of blocks before and to its hidden states, all normalized, [B, T, r, D] to
    [B, T, D], for `count` queries to [count, B, T, D]. In float32."""

    def __init__(self, config: Any, count: int = 1):
        D = config.sizes["D"]
        self.query = nnx.Param(jnp.zeros((D,) if count == 1 else (count, D), jnp.float32))

    def __call__(self, x_BTrD: jax.Array) -> jax.Array:
        query = self.query[...]
        mixed_qBTD = mixed_streams(x_BTrD, query.reshape(-1, x_BTrD.shape[-1]))
        return mixed_qBTD[0] if query.ndim == 1 else mixed_qBTD


def mixed_streams(x_BTrD: jax.Array, query_qD: jax.Array) -> jax.Array:
    """Returns the mixture [q, B, T, D] of normalized streams that each query attends to, in float32."""
    x_BTrD, query_qD = normalize(x_BTrD, 1, 1e-6), query_qD.astype(jnp.float32)
    scores_qBTr = (x_BTrD * query_qD[:, None, None, None]).sum(-1) * x_BTrD.shape[-1] ** -0.5
    return exact_einsum("qBTr,BTrD->qBTD", nnx.softmax(scores_qBTr), x_BTrD)


def length_limited(x: jax.Array, limit: float) -> jax.Array:
    """Returns vectors (last axis) of a length of at most `limit`, in float32."""
    x = x.astype(jnp.float32)
    return x * jnp.minimum(limit / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6), 1)


class ScaledClip(nnx.Module):
    """Vectors [B, T, N, ...] with a learned factor for each dimension, of a length of at most `limit`; with a `floor`
    they grow at late positions (`temperature`)."""

    def __init__(self, shape: tuple[int, ...], limit: float, floor: int | None, alpha: float, dtype: DTypeLike):
        self.scale = nnx.Param(jnp.ones(shape, dtype))
        self.limit, self.floor, self.alpha = limit, floor, alpha

    def __call__(self, x: jax.Array, step: Step) -> jax.Array:
        y = length_limited(x.astype(jnp.float32) * self.scale[...].astype(jnp.float32), self.limit).astype(x.dtype)
        if self.floor is None:
            return y
        return (y.astype(jnp.float32) * temperature(step, self.floor, self.alpha)[..., None, None]).astype(x.dtype)


class ClippedPositions(RelativePositions):
    """Relative positions whose weights have a limited length."""

    def __init__(self, config: Any, floor: int | None, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        super().__init__(sizes, dtype=dtype, keys=keys)
        shape = (sizes["N"], sizes["relative_dim"])
        self.clip = ScaledClip(shape, config.rel_l2_clip_threshold, floor, config.log_scaling_alpha, dtype)

    def mixed(self, mix_BTNr: jax.Array, step: Step) -> jax.Array:
        mixed_BTNr: jax.Array = self.clip(mix_BTNr, step)
        return mixed_BTNr


class StaticConvolution(ResidualConvolution):
    """A convolution with the same taps for all tokens, and its input."""

    def scaled(self, y: jax.Array) -> jax.Array:
        return jnp.asarray(y / (self.kernel.shape[-1] + 1) ** 0.5)


class DynamicConvolution(nnx.Module):
    """A causal convolution of keys or values [B, T, K, H] along the tokens, to which its input is added. The taps are
    sums of learned ones and of some that each token makes for each head. The first tap is that of the current token."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.kernel = nnx.Param(jnp.zeros((sizes["c"], sizes["K"], sizes["H"]), dtype))
        self.taps = Einsum("BTD,DKc->BTKc", sizes, dtype=dtype, keys=keys)

    def smoothed(self, y: jax.Array, x_BTD: jax.Array, step: Step, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output [B, T, K, H] for y, with taps made of `x_BTD`, and the last inputs [B, c - 1, K, H], as
        `last` has them of the tokens before. Sums are in float32."""
        (B, T), count = y.shape[:2], self.kernel.shape[0]
        learned_KcH = jnp.moveaxis(self.kernel[...].astype(jnp.float32), 0, 1)
        weights = self.taps(x_BTD).astype(jnp.float32)[..., None] + learned_KcH
        both = jnp.concatenate([y.astype(jnp.float32)[:, :, :, None], weights], axis=3)
        packed = PackedTokens.of(both.reshape(B, T, -1), step)
        both = packed.x_BTD.reshape(both.shape)
        inputs = jnp.concatenate([last, both[:, :, :, 0]], axis=1)
        lags = [inputs[:, count - 1 - lag : count - 1 - lag + T] * both[:, :, :, lag + 1] for lag in range(count)]
        out = packed.unpacked(sum(lags[1:], lags[0]).reshape(B, T, -1)).reshape(y.shape)
        at_Bc = packed.length_B[:, None] + jnp.arange(count - 1)
        last = jnp.take_along_axis(inputs, at_Bc[:, :, None, None], axis=1)
        return ((out + y.astype(jnp.float32)) / (2 * count + 1) ** 0.5).astype(y.dtype), last


class Attention(nnx.Module):
    """Grouped-query attention: what queries, keys and values are made of, each [B, T, D], to [B, T, D]. Also returns
    the keys and values of all tokens so far, and the last inputs of the convolutions of both."""

    def __init__(self, config: Any, *, is_full: bool, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        floor = config.log_scaling_n_floor if is_full else None
        self.q = Einsum("BTD,DNH->BTNH", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,DKH->BTKH", sizes, dtype=dtype, keys=keys)
        self.v = Einsum("BTD,DKH->BTKH", sizes, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DNH->BTNH", sizes, dtype=dtype, keys=keys)
        self.sinks = Einsum("BTD,DN->BTN", sizes, dtype=dtype, keys=keys)
        self.limit, self.eps = config.qk_l2_clip_threshold, config.rms_norm_eps
        self.q_clip = ScaledClip((sizes["N"], sizes["H"]), self.limit, floor, config.log_scaling_alpha, dtype)
        if is_full:
            self.k_conv: Any = DynamicConvolution(config, dtype=dtype, keys=keys)
            self.v_conv: Any = DynamicConvolution(config, dtype=dtype, keys=keys)
        else:
            self.k_conv = StaticConvolution("KH", sizes, dtype=dtype, keys=keys)
            self.v_conv = StaticConvolution("KH", sizes, dtype=dtype, keys=keys)

    def __call__(
        self,
        x_BTD: jax.Array,
        of_keys_BTD: jax.Array,
        of_values_BTD: jax.Array,
        bias_BNTS: jax.Array,
        step: Step,
        window: jax.Array | int,
        kv: KV | None,
        states: ConvolutionStates,
    ) -> tuple[jax.Array, KV, tuple[jax.Array, jax.Array]]:
        k_BTKH, k_last = self.smoothed(self.k_conv, self.k(of_keys_BTD), of_keys_BTD, step, states.k_BcKH)
        v_BTKH, v_last = self.smoothed(self.v_conv, self.v(of_values_BTD), of_values_BTD, step, states.v_BcKH)
        k_BTKH = length_limited(k_BTKH, self.limit).astype(x_BTD.dtype)
        kv = append_kv(kv, k_BTKH, normalize(v_BTKH, 1, self.eps).astype(x_BTD.dtype), step.slot)
        q_BTNH = self.q_clip(self.q(x_BTD), step)
        scale = q_BTNH.shape[-1] ** -0.5
        y_BTNH = attention_with_bias(q_BTNH, kv, step.visible(window), bias_BNTS, scale, self.sinks(x_BTD))
        gates_BTNH = nnx.sigmoid(self.gate(x_BTD).astype(jnp.float32))
        return self.o((y_BTNH.astype(jnp.float32) * gates_BTNH).astype(y_BTNH.dtype)), kv, (k_last, v_last)

    def smoothed(
        self, conv: Any, y: jax.Array, x_BTD: jax.Array, step: Step, last: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the output of a convolution of keys or values y [B, T, K, H] that are made of x, and its state."""
        is_dynamic = isinstance(conv, DynamicConvolution)
        out: tuple[jax.Array, jax.Array] = conv.smoothed(*((y, x_BTD) if is_dynamic else (y,)), step, last)
        return out


class Router(Einsum):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts, those with the highest sigmoids of scores
    and corrections. The weights are the sigmoids, divided by their sum. Computed in float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys)
        self.config = config
        self.correction = nnx.Param(jnp.zeros(config.sizes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:  # type: ignore[override]
        scores_BTE = nnx.sigmoid(placed(exact_product("BTD,DE->BTE", x_BTD, self.kernel[...]), "B T E"))
        wanted_BTE = scores_BTE + self.correction[...].astype(jnp.float32)
        ids_BTX = jax.lax.top_k(wanted_BTE, self.config.num_experts_per_tok)[1]
        weights_BTX = jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1)
        return ids_BTX, weights_BTX / (weights_BTX.sum(-1, keepdims=True) + 1e-20) * self.config.route_scale


class MoE(GatedExperts):
    """The chosen experts, x [B, T, D] to [B, T, D]. Gates and values have soft limits, the sigmoid of a gate has
    none."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)
        self.caps = config.mlp_gate_softcap, config.mlp_up_softcap

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        return super().__call__(x_BTD, *self.router(x_BTD))

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        (gate_cap, up_cap), dtype = self.caps, gate.dtype
        gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
        return (soft_capped(gate, gate_cap) * nnx.sigmoid(gate) * soft_capped(up, up_cap)).astype(dtype)


class Block(nnx.Module):
    """One layer: attention, then experts, each after a norm and before a convolution. Each reads a mixture of the
    hidden states and of the outputs of the blocks before. The first layer of a block begins new hidden states."""

    def __init__(self, config: MixedBlocksConfig, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.is_full, self.is_first = config.windows[layer] is None, layer % config.n_layers_per_attn_res_block == 0
        self.blocks = -(-layer // config.n_layers_per_attn_res_block)
        self.config = config.of_layer(layer)
        sizes = config.sizes

        def norm() -> ScaledRMSNorm:
            return ScaledRMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)

        if layer:
            self.attn_input = BlockAttention(config, sizes["streams_read"] if self.is_full else 1)
        if self.is_full:
            self.q_input_norm, self.k_input_norm, self.v_input_norm = norm(), norm(), norm()
        else:
            self.attn_norm = norm()
        self.attn = Attention(self.config, is_full=self.is_full, dtype=dtype, keys=keys)
        floor = config.log_scaling_n_floor if self.is_full else None
        self.relative = ClippedPositions(self.config, floor, dtype=dtype, keys=keys)
        self.attn_conv = StaticConvolution("D", sizes, dtype=dtype, keys=keys)
        self.mlp_input = BlockAttention(config)
        self.mlp_norm = norm()
        self.moe = MoE(config, dtype=dtype, keys=keys)
        self.mlp_conv = StaticConvolution("D", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        keys, states = kv or (None, ConvolutionStates.empty(self.config, len(x_BTD)))
        x_BTrD = x_BTD.reshape(*x_BTD.shape[:2], -1, self.config.sizes["D"])
        x_BTD, blocks_BTrD = x_BTrD[:, :, 0], x_BTrD[:, :, 1 : 1 + self.blocks]
        y_BTD, of_keys_BTD, of_values_BTD = self.attention_inputs(x_BTD, blocks_BTrD, step)
        bias_BNTS = self.relative(y_BTD, step)
        y_BTD, keys, (k_last, v_last) = self.attn(
            y_BTD, of_keys_BTD, of_values_BTD, bias_BNTS, step, window, keys, states
        )
        y_BTD, attn_last = self.attn_conv.smoothed(y_BTD, step, states.attn_BcD)
        rest_BTD = y_BTD.astype(jnp.float32)
        if self.is_first:
            blocks_BTrD = with_stream(blocks_BTrD, x_BTD)
        else:
            rest_BTD += x_BTD.astype(jnp.float32)
        y_BTD = self.moe(self.mlp_norm(self.fed_by(blocks_BTrD, rest_BTD, step)).astype(x_BTD.dtype))
        y_BTD, mlp_last = self.mlp_conv.smoothed(y_BTD, step, states.mlp_BcD)
        x_BTD = (rest_BTD + y_BTD.astype(jnp.float32)).astype(x_BTD.dtype)
        x_BTrD = jnp.concatenate([x_BTD[:, :, None], blocks_BTrD, x_BTrD[:, :, 1 + blocks_BTrD.shape[2] :]], axis=2)
        return x_BTrD.reshape(*x_BTD.shape[:2], -1), (keys, ConvolutionStates(k_last, v_last, attn_last, mlp_last))

    def attention_inputs(self, x_BTD: jax.Array, blocks_BTrD: jax.Array, step: Step) -> list[jax.Array]:
        """Returns what queries, keys and values are made of, each [B, T, D]."""
        norms = (self.q_input_norm, self.k_input_norm, self.v_input_norm) if self.is_full else (self.attn_norm,) * 3
        mixtures = self.mixtures(x_BTD, blocks_BTrD, step)
        return [norm(each).astype(x_BTD.dtype) for norm, each in zip(norms, mixtures, strict=True)]

    def mixtures(self, x_BTD: jax.Array, blocks_BTrD: jax.Array, step: Step) -> list[jax.Array]:
        """Returns the inputs of the norms before queries, keys and values, each [B, T, D]. Families whose layers read
        something else besides override this and `fed_by`."""
        mixed = self.attn_input(with_stream(blocks_BTrD, x_BTD)) if hasattr(self, "attn_input") else x_BTD
        return list(mixed) if mixed.ndim > x_BTD.ndim else [mixed] * 3

    def fed_by(self, blocks_BTrD: jax.Array, x_BTD: jax.Array, step: Step) -> jax.Array:
        """Returns what the experts read, [B, T, D] in float32."""
        return self.mlp_input(with_stream(blocks_BTrD, x_BTD))


class MixedNorm(ScaledRMSNorm):
    """The norm of a mixture of the hidden states and the outputs of blocks, [B, T, (r D)] to [B, T, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike):
        super().__init__("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.input = BlockAttention(config)

    def __call__(self, x: jax.Array) -> jax.Array:
        x_BTrD = x.reshape(*x.shape[:2], -1, self.scale.shape[0])
        return super().__call__(self.input(x_BTrD)).astype(x.dtype)


class Model(ConvolvedDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block, embed_norm_type = Block, ScaledRMSNorm
    config: MixedBlocksConfig

    def __init__(self, config: MixedBlocksConfig, *, dtype: DTypeLike = jnp.bfloat16, **options: Any):
        super().__init__(config, dtype=dtype, **options)
        self.norm = MixedNorm(config, dtype=dtype)

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        return jnp.pad(x_BTD, ((0, 0), (0, 0), (0, self.config.block_count * x_BTD.shape[-1])))

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        logits_BTV = logits_BTV.astype(jnp.float32)[..., : self.config.logit_count]
        return soft_capped(logits_BTV, self.config.final_logit_softcapping)
