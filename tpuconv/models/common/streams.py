"""Hyper-connections (arXiv:2409.19606), constrained to a manifold (arXiv:2512.24880): several residual streams in place
of one. Between layers they are one array [B, T, (r D)].

In einsums and names of arrays, r and w are streams (w as an output), k their weights.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, RMSNorm, ScaledRMSNorm, exact_product, normal, normalize
from tpuconv.models.common.steps import Step


def to_streams(x_BTD: jax.Array, count: int) -> jax.Array:
    """Returns `count` copies of the hidden states, [B, T, (r D)]."""
    return jnp.tile(x_BTD, (1, 1, count))


def with_stream(x_BTrD: jax.Array, y_BTD: jax.Array) -> jax.Array:
    """Returns streams with one more, in the dtype of both."""
    return jnp.concatenate([x_BTrD, y_BTD[:, :, None]], axis=2)


def by_stream(x_BTD: jax.Array, count: int) -> jax.Array:
    """Returns the streams [B, T, r, D] of [B, T, (r D)]."""
    return x_BTD.reshape(*x_BTD.shape[:2], count, -1)


def balanced(mix_BTrw: jax.Array, times: int, eps: float) -> jax.Array:
    """Returns the matrices, whose rows and then columns were divided by their sums so many times (Sinkhorn-Knopp)."""

    def once(_: int, mix_BTrw: jax.Array) -> jax.Array:
        mix_BTrw = mix_BTrw / (mix_BTrw.sum(axis=-1, keepdims=True) + eps)
        balanced_BTrw: jax.Array = mix_BTrw / (mix_BTrw.sum(axis=-2, keepdims=True) + eps)
        return balanced_BTrw

    balanced_BTrw: jax.Array = jax.lax.fori_loop(0, times, once, mix_BTrw)
    return balanced_BTrw


class Streams(nnx.Module):
    """The streams' weights for a part of a layer: what it reads of each, writes to each, and how they are mixed. All in
    float32. The config has `hc_mult`, `hc_eps`, `hc_sinkhorn_iters` and `rms_norm_eps`."""

    def __init__(self, config: Any, *, keys: Keys):
        self.config, r = config, config.hc_mult
        weights = (2 + r) * r
        self.kernel = nnx.Param(normal(keys(), (r, config.sizes["D"], weights), jnp.float32))
        self.base = nnx.Param(jnp.zeros(weights, jnp.float32))
        self.pre_scale = nnx.Param(jnp.ones(1, jnp.float32))
        self.post_scale = nnx.Param(jnp.ones(1, jnp.float32))
        self.mix_scale = nnx.Param(jnp.ones(1, jnp.float32))

    def __call__(self, x_BTrD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the input [B, T, D] of the part, and the other results of `weights`."""
        pre_BTr, post_BTr, mix_BTrw = self.weights(x_BTrD)
        return read_streams(x_BTrD, pre_BTr), post_BTr, mix_BTrw

    def weights(self, x_BTrD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the weights [B, T, r] of the streams in the input of a part, the weights [B, T, r] of its output in
        each stream, and the mixing matrices [B, T, r, w], whose rows and columns sum to 1 (Sinkhorn-Knopp;
        arXiv:2512.24880, section 4.2)."""
        eps = self.config.hc_eps
        pre_BTr, post_BTr, mix_BTrw = self.logits(x_BTrD)
        mix_BTrw = nnx.softmax(mix_BTrw) + eps
        mix_BTrw /= mix_BTrw.sum(axis=-2, keepdims=True) + eps
        mix_BTrw = balanced(mix_BTrw, self.config.hc_sinkhorn_iters - 1, eps)
        return nnx.sigmoid(pre_BTr) + eps, 2 * nnx.sigmoid(post_BTr), mix_BTrw

    def logits(self, x_BTrD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what the three results of `weights` are computed from, in their shapes."""
        config, r, base = self.config, self.config.hc_mult, self.base[...].astype(jnp.float32)
        weights_BTk = exact_product("BTrD,rDk->BTk", normalize(x_BTrD, 2, config.rms_norm_eps), self.kernel[...])
        pre_BTr = weights_BTk[..., :r] * self.pre_scale[...] + base[:r]
        post_BTr = weights_BTk[..., r : 2 * r] * self.post_scale[...] + base[r : 2 * r]
        mix_BTk = weights_BTk[..., 2 * r :] * self.mix_scale[...] + base[2 * r :]
        return pre_BTr, post_BTr, mix_BTk.reshape(*pre_BTr.shape, r)

    def written(self, x_BTrD: jax.Array, y_BTD: jax.Array, post_BTr: jax.Array, mix_BTrw: jax.Array) -> jax.Array:
        """Returns the streams [B, T, r, D], mixed, with the output of the part."""
        mixed_BTrD = jnp.einsum("BTrw,BTrD->BTwD", mix_BTrw.astype(x_BTrD.dtype), x_BTrD)
        return post_BTr.astype(x_BTrD.dtype)[..., None] * y_BTD[:, :, None] + mixed_BTrD


class ClampedStreams(Streams):
    """The streams' weights of Xing 4.0. The logits of the mixing matrices have limits. The rows of these matrices are
    the streams that are written. The config has `mhc_h_res_clamp_min` and `mhc_h_res_clamp_max` too."""

    def weights(self, x_BTrD: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        config = self.config
        pre_BTr, post_BTr, mix_BTwr = self.logits(x_BTrD)
        mix_BTwr = jnp.clip(mix_BTwr, config.mhc_h_res_clamp_min, config.mhc_h_res_clamp_max)
        mix_BTwr = jnp.exp(mix_BTwr - mix_BTwr.max(axis=-1, keepdims=True))
        mix_BTwr = balanced(mix_BTwr, config.hc_sinkhorn_iters, config.hc_eps)
        return nnx.sigmoid(pre_BTr), 2 * nnx.sigmoid(post_BTr), jnp.swapaxes(mix_BTwr, -1, -2)


class GatedStreams(nnx.Module):
    """The weights of streams that are not mixed with each other: what a part of a layer reads of each, and writes to
    each. All in float32. The config has `hc_mult`, `hc_eps`, `hc_magnitude` and `rms_norm_eps`."""

    def __init__(self, config: Any, *, keys: Keys):
        sizes = config.sizes
        self.config = config
        shape = tuple(sizes[name] for name in ("streams", "D", "stream_weights"))
        self.kernel = nnx.Param(normal(keys(), shape, jnp.float32))
        self.base = nnx.Param(jnp.zeros(shape[-1], jnp.float32))
        self.pre_scale = nnx.Param(jnp.ones(1, jnp.float32))
        self.post_scale = nnx.Param(jnp.ones(1, jnp.float32))

    def __call__(self, x_BTrD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the input [B, T, D] of the part, and the weights [B, T, r] of its output in each stream."""
        config, r = self.config, self.config.hc_mult
        base = self.base[...].astype(jnp.float32)
        weights_BTk = exact_product("BTrD,rDk->BTk", normalize(x_BTrD, 2, config.rms_norm_eps), self.kernel[...])
        pre_BTr = nnx.sigmoid(weights_BTk[..., :r] * self.pre_scale[...] + base[:r]) + config.hc_eps
        post_BTr = nnx.sigmoid(weights_BTk[..., r:] * self.post_scale[...] + base[r:])
        return read_streams(x_BTrD, pre_BTr), config.hc_magnitude * post_BTr + config.hc_eps

    def written(self, x_BTrD: jax.Array, y_BTD: jax.Array, post_BTr: jax.Array) -> jax.Array:
        """Returns the streams [B, T, r, D] with the output of the part, in their dtype."""
        return (post_BTr[..., None] * y_BTD[:, :, None].astype(jnp.float32) + x_BTrD).astype(x_BTrD.dtype)


def read_streams(x_BTrD: jax.Array, pre_BTr: jax.Array) -> jax.Array:
    """Returns the weighted sum [B, T, D] of the streams, in their dtype."""
    return (pre_BTr[..., None] * x_BTrD).sum(axis=2).astype(x_BTrD.dtype)


class StreamsBlock(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm and between the streams.

    Attributes:
        streams_type: the class of the streams' weights.
    """

    streams_type: ClassVar[Callable[..., Any]] = Streams

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.count = config.hc_mult
        self.attn_streams = self.streams_type(config, keys=keys)
        self.mlp_streams = self.streams_type(config, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        x_BTrD = by_stream(x_BTD, self.count)
        y_BTD, *weights = self.attn_streams(x_BTrD)
        y_BTD, kv = self.attn(self.attn_norm(y_BTD), step, window, kv)
        x_BTrD = self.attn_streams.written(x_BTrD, y_BTD, *weights)
        y_BTD, *weights = self.mlp_streams(x_BTrD)
        x_BTrD = self.mlp_streams.written(x_BTrD, self.fed(self.mlp_norm(y_BTD)), *weights)
        return x_BTrD.reshape(x_BTD.shape), kv


class StreamsDecoder(Decoder):
    """A decoder with `hc_mult` residual streams. A family's class derives from this class and from another, in this
    order."""

    config: Any

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Returns the streams [B, T, (r D)] of the first layer, which are copies of its input."""
        return to_streams(x_BTD, self.config.hc_mult)


class StreamMeanNorm(RMSNorm):
    """The last norm: of the mean of the streams, x [B, T, (r D)] to [B, T, D]."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(by_stream(x, x.shape[-1] // self.scale.shape[0]).mean(axis=2))


class JoinedNorm(ScaledRMSNorm):
    """The last norm: of the weighted sum of the streams, x [B, T, (r D)] to [B, T, D]."""

    def __init__(self, config: Any, *, dtype: Any, keys: Keys):
        super().__init__("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.config, sizes = config, config.sizes
        shape = tuple(sizes[name] for name in ("streams", "D", "streams_out"))
        self.kernel = nnx.Param(normal(keys(), shape, jnp.float32))
        self.base = nnx.Param(jnp.zeros(shape[-1], jnp.float32))
        self.pre_scale = nnx.Param(jnp.ones(1, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.joined(x))

    def joined(self, x: jax.Array) -> jax.Array:
        """Returns the weighted sum [B, T, D] of the streams."""
        x_BTrD = by_stream(x, self.config.hc_mult)
        weights_BTw = exact_product("BTrD,rDw->BTw", normalize(x_BTrD, 2, self.eps), self.kernel[...])
        pre_BTr = nnx.sigmoid(weights_BTw * self.pre_scale[...] + self.base[...]) + self.config.hc_eps
        return read_streams(x_BTrD, pre_BTr)
