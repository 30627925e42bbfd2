"""MLPs, norms and layers of single families that otherwise are as Llama."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import (
    Einsum,
    Embed,
    Keys,
    PlainRMSNorm,
    RMSNorm,
    apply_rope,
    attention,
    normalize,
    relu2,
    times,
)
from tpuconv.models.common.loops import LoopedDecoder
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters


class XIELU(nnx.Module):
    """The activation xIELU (arXiv:2411.13010), with two learned numbers, in the dtype of x."""

    def __init__(self, *, dtype: DTypeLike):
        self.alpha_p, self.alpha_n = nnx.Param(jnp.zeros(1, dtype)), nnx.Param(jnp.zeros(1, dtype))
        self.beta, self.eps = nnx.Param(jnp.full((), 0.5, dtype)), nnx.Param(jnp.full((), -1e-6, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        alpha_p, alpha_n, beta, eps = (
            param[...].astype(x.dtype) for param in (self.alpha_p, self.alpha_n, self.beta, self.eps)
        )
        positive = nnx.softplus(alpha_p) * x * x + beta * x
        negative = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + nnx.softplus(alpha_n)) + beta * x
        return jnp.where(x > 0, positive, negative)


class XIELUMLP(blocks.PlainMLP):
    """MLP without a gate with this activation, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, F: str, **options: Any):
        super().__init__(config, F, **options)
        self.xielu = XIELU(dtype=options["dtype"])

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return self.xielu(x_BTF)


class DownBiasedMLP(blocks.GatedMLP):
    """Gated MLP whose last product alone has a bias, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Any, F: str, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, F, dtype=dtype, keys=keys)
        self.down = Einsum("BTF,FD->BTD", with_letters(config.sizes, {"F": F}), bias=True, dtype=dtype, keys=keys)


class SubNormedAttention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D], with a norm of all heads together before the last matrix.
    Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.sub_norm = RMSNorm("NH", config.sizes, config.rms_norm_eps, dtype=options["dtype"])

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return self.sub_norm(y_BTNH)


class SubNormedMLP(blocks.GatedMLP):
    """Gated MLP, x [B, T, D] to [B, T, D], with a norm before the last matrix."""

    def __init__(self, config: Any, F: str, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, F, dtype=dtype, keys=keys)
        self.sub_norm = RMSNorm("F", config.sizes, config.rms_norm_eps, dtype=dtype)

    def hidden(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        y: jax.Array = self.sub_norm(super().hidden(gate, up))
        return y

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return relu2(x_BTF)


class SideBySideBlock(blocks.PreNormBlock):
    """One layer: attention and MLP, one after the other with a norm each, or side by side after the same norm."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.parallel = config.use_parallel_residual
        if self.parallel:
            del self.mlp_norm

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        if not self.parallel:
            return super().__call__(x_BTD, step, window, kv)
        normed_BTD = self.attn_norm(x_BTD)
        y_BTD, kv = self.attn(normed_BTD, step, window, kv)
        return x_BTD + y_BTD + self.mlp(normed_BTD), kv


class BackwardAttention(blocks.Attention):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far. Rotary
    positions turn by negative angles; then queries and keys are normalized, each head separately."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.head_norm = PlainRMSNorm("H", config.sizes, config.rms_norm_eps, dtype=options["dtype"])

    def positioned(self, q_BTNH: jax.Array, k_BTKH: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        cos, sin = step.cos_sin_in(q_BTNH.dtype)
        return self.head_norm(apply_rope(q_BTNH, (cos, -sin))), self.head_norm(apply_rope(k_BTKH, (cos, -sin)))


class NormedInputs(Decoder):
    """A decoder whose embeddings are normalized."""

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return normalize(x_BTD, 1, self.config.rms_norm_eps).astype(x_BTD.dtype)


class InputEmbed(Embed):
    """The embedding matrix of a model whose head has fewer rows."""

    def __init__(self, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        super().__init__({**sizes, "V": sizes["input_vocab"]}, dtype=dtype, keys=keys)


class MoreTokensThanLogits(Decoder):
    """A decoder with logits of the first tokens of its vocabulary alone."""

    embed_type = InputEmbed


class NumberedBlock(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections. Attention depends on the number of
    the layer."""

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return self.attention_type(config, layer=layer, dtype=dtype, keys=keys)


class MatrixMixer(nnx.Module):
    """A matrix in place of attention, x [B, T, D] to [B, T, D]. It has no cache."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.linear = Einsum("BTA,AD->BTD", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: None) -> tuple[jax.Array, None]:
        return self.linear(x_BTD), None


class ChosenBlock(blocks.PreNormBlock):
    """One layer: attention or a matrix, then an MLP, each after a norm, with residual connections. Either may be
    absent, with its norm."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        config, sets = config.of_layer(layer), config.layer_sets
        new_norm = partial(self.norm_type, "D", config.sizes, config.rms_norm_eps, dtype=dtype)
        if layer in sets["attention_blocks"] or layer in sets["linear_blocks"]:
            self.attn_norm = new_norm()
            kind = MatrixMixer if layer in sets["linear_blocks"] else self.attention_type
            self.attn = kind(config, dtype=dtype, keys=keys)
        if layer in sets["mlp_blocks"]:
            self.mlp_norm = new_norm()
            self.mlp = self.mlp_type(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        if hasattr(self, "attn"):
            y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
            x_BTD = x_BTD + y_BTD
        return (x_BTD + self.mlp(self.mlp_norm(x_BTD)) if hasattr(self, "mlp") else x_BTD), kv


class ChosenLayers(Decoder):
    """A decoder whose layers differ in key-value heads, and of which some have no attention."""

    def cached(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> KV | None:
        has_keys = layer in config.layer_sets["attention_blocks"]
        return KV.empty(config.of_layer(layer), layer, shape, dtype) if has_keys else None


class DifferenceAttention(blocks.Attention):
    """The difference of two softmax attentions (arXiv:2410.05258), x [B, T, D] to [B, T, D]. Also returns the keys and
    values of all tokens so far. The heads n and n + N/2 are a pair; the values of a pair are twice as wide as keys: the
    values of the key-value heads j and j + K/2. What the second head of a pair reads is subtracted with a weight."""

    def __init__(self, config: Any, *, layer: int, **options: Any):
        super().__init__(config, **options)
        self.eps, self.initial = config.rms_norm_eps, 0.8 - 0.6 * math.exp(-0.3 * layer)
        zeros = jnp.zeros(config.sizes["H"], options["dtype"])
        self.lambda_q1, self.lambda_k1 = nnx.Param(zeros), nnx.Param(zeros)
        self.lambda_q2, self.lambda_k2 = nnx.Param(zeros), nnx.Param(zeros)

    def attended(self, q_BTNH: jax.Array, kv: KV, visible_BTS: jax.Array, step: Step) -> jax.Array:
        both = [attention(q_BTNH, half, visible_BTS) for half in _halves_of_values(kv)]
        first, second = jnp.split(jnp.concatenate(both, axis=-1), 2, axis=2)
        difference = first - self.weight().astype(first.dtype) * second
        normed = normalize(difference, 1, self.eps).astype(first.dtype) * (1 - self.initial)
        return normed.reshape(q_BTNH.shape)

    def weight(self) -> jax.Array:
        """Returns the weight of what is subtracted, in float32."""
        pairs = ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        first, second = (jnp.exp(jnp.sum(q[...].astype(jnp.float32) * k[...].astype(jnp.float32))) for q, k in pairs)
        return first - second + self.initial


def _halves_of_values(kv: KV) -> list[KV]:
    """Returns the keys with the values of the first half of the heads for both halves, and of the second half."""

    def halves(x: jax.Array) -> list[jax.Array]:
        return [jnp.concatenate([half, half], axis=2) for half in jnp.split(x, 2, axis=2)]

    values = halves(kv.v_BSKH)
    if kv.v_scale_BSK is None:
        return [replace(kv, v_BSKH=half) for half in values]
    both = zip(values, halves(kv.v_scale_BSK), strict=True)
    return [replace(kv, v_BSKH=half, v_scale_BSK=scales) for half, scales in both]


class SkippingDecoder(LoopedDecoder):
    """A decoder in which hidden states that enter some layers are mixed with the ones that entered earlier layers."""

    config: Any

    def entering(self, execution: int, x_BTD: jax.Array, kept: dict[str, Any]) -> jax.Array:
        for place, (keeping, _) in enumerate(self.config.skips):
            if execution in keeping:
                kept[f"place {place}"] = x_BTD
        weight = self.config.bskcn_tv[1]
        for place, (_, mixing) in enumerate(self.config.skips):
            if execution in mixing:
                x_BTD = times(kept[f"place {place}"], weight) + times(x_BTD, 1 - weight)
        return x_BTD
