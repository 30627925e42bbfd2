"""The audio encoder of Gemma 3n, which Gemma 4's derives from: its convolutions see frames behind, and are normalized
over all frames so far."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.convolutions import StridedConvolution
from tpuconv.models.towers.encoder import FeatureEncoder
from tpuconv.models.towers.gemma4.audio import ConformerLayer, frames_of, random_frames

LEADS = 4
"""The frames for each of which the convolutions have one."""


class CumulativeNorm(nnx.Module):
    """Group norm of one group (arXiv:1803.08494), whose statistics at a frame are of all frames until then, x [B, T, M,
    C] to the same, in float32. The variance at a frame is of differences from the mean until each frame."""

    def __init__(self, channels: int, eps: float, *, dtype: DTypeLike):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(channels, dtype))

    def __call__(self, x_BTMC: jax.Array) -> jax.Array:
        x = x_BTMC.astype(jnp.float32)
        counts_T11 = x[0, 0].size * jnp.arange(1, x.shape[1] + 1, dtype=jnp.float32)[:, None, None]

        def mean(x_BTMC: jax.Array) -> jax.Array:
            return jnp.cumsum(x_BTMC.sum(axis=(2, 3), keepdims=True), axis=1) / counts_T11

        away = x - mean(x)
        y = away * jax.lax.rsqrt(mean(jnp.square(away)) + self.eps) * self.scale[...].astype(jnp.float32)
        return y.astype(x_BTMC.dtype)


class MaskedLayer(ConformerLayer):
    """A layer of Gemma 4's encoder whose convolution does not read padding, [B, T, D] to [B, T, D]."""

    def __call__(self, x_BTD: jax.Array, is_sound_BT: jax.Array) -> jax.Array:
        x_BTD = self.attended(self.mlp_before(x_BTD), is_sound_BT) * is_sound_BT[..., None]
        return self.convolved(x_BTD)


class Gemma3nUsm(FeatureEncoder):
    """Frames [B, T, M] of mel spectrograms to features [Z, O]: of sounds, one after the other, then of the words of the
    projector. Each sound has as many placeholders as config.json says; those behind its own features have the embedding
    of the last id."""

    takes = ("input_features", "input_features_mask")
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        widths = (1, sizes["C"], sizes["E"])
        self.convs = nnx.List(
            [
                StridedConvolution((3, 3, *pair), stride=2, bias=False, pad=0, dtype=dtype, keys=keys)
                for pair in pairwise(widths)
            ]
        )
        self.conv_norms = nnx.List(
            [CumulativeNorm(width, config.sscp_conv_group_norm_eps, dtype=dtype) for width in widths[1:]]
        )
        self.entry = Einsum("BTM,MD->BTD", sizes, dtype=dtype, keys=keys)
        self.layers = nnx.List([MaskedLayer(config, dtype=dtype, keys=keys) for _ in range(sizes["L"])])

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        stride = LEADS * self.config.reduction_factor
        return random_frames(rng, min(5, self.config.audio_soft_tokens_per_image) * stride, self.config.input_feat_size)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        each, stride = self.config.audio_soft_tokens_per_image, LEADS * self.config.reduction_factor
        frames_BTM, is_sound_BT, counts = frames_of(features, stride)
        frames = features["input_features"].shape[1]
        if (own := -(-frames // stride)) > each:
            raise UsageError(
                f"input_features has {frames} frames, which make {own} features, and the text has {each} placeholders "
                "for a sound",
                hint="cut sounds as the release's processor does",
            )
        is_frame_T = np.arange(frames_BTM.shape[1]) < frames
        is_feature_BT = is_sound_BT[:, ::stride]
        places = self.projector.places(is_feature_BT.size)
        last = is_feature_BT.size + self.config.vocabulary - 1 - self.config.vocab_offset
        rows = np.full((len(counts), each), last)
        for row, is_feature_T, first in zip(
            rows, is_feature_BT, np.arange(len(rows)) * is_feature_BT.shape[1], strict=False
        ):
            at = np.flatnonzero(is_feature_T)
            row[at] = first + at
        arrays = (frames_BTM, is_sound_BT, is_frame_T)
        return Prepared(arrays, rows.reshape(-1), [each] * len(counts), others=places)

    def __call__(
        self, frames_BTM: jax.Array, is_sound_BT: jax.Array, is_frame_T: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BTMC = frames_BTM[..., None].astype(self.convs[0].kernel.dtype)
        for conv, norm in zip(self.convs, self.conv_norms, strict=True):
            # behind the last frame are zeros, however far frames are padded
            x_BTMC = jnp.pad(x_BTMC * is_frame_T[:, None, None], ((0, 0), (0, 2), (1, 1), (0, 0)))
            x_BTMC = nnx.relu(norm(conv(x_BTMC)))
            is_sound_BT, is_frame_T = is_sound_BT[:, ::2], is_frame_T[::2]
        x_BTD = self.entry(x_BTMC.reshape(*x_BTMC.shape[:2], -1))
        for layer in self.layers:
            x_BTD = layer(x_BTD, is_sound_BT)
        return self.projector.with_words(x_BTD[:, :: self.config.reduction_factor]), ()
