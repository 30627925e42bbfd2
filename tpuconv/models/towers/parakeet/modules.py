"""The encoder of Parakeet. As in transformers, a sound may have a feature of the frames right behind it, which see all
frames of the batch alike.

Letters: B sounds, T frames, later an eighth of them, S frames as keys, R distances of two frames; others as
`ParakeetConfig` has them."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, LayerNorm
from tpuconv.models.common.seen import Deep, Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.conformer.modules import SPEECH_EPS, HalvedMLP, MacaronLayer, SpeechConvolution
from tpuconv.models.towers.convolutions import SoundEntry
from tpuconv.models.towers.encoder import FeatureEncoder, feature_rows, given, padded
from tpuconv.models.towers.gemma4.audio import random_frames
from tpuconv.models.towers.places import bucket
from tpuconv.models.towers.qwen_audio.family import halved
from tpuconv.models.towers.radio.modules import SquaredRelu

SOUND_MASK = "input_features_mask"


class ParakeetAttention(nnx.Module):
    """Attention with keys for distances, and a bias of the queries for each kind of keys (arXiv:1901.02860, 3.3), x [B,
    T, D] to [B, T, D]. Scores are in float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        matrix = partial(Einsum, sizes=sizes, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", sizes, SPEECH_EPS, dtype=dtype)
        self.q, self.k, self.v = (matrix("BTD,DNH->BTNH", bias=config.attention_bias) for _ in range(3))
        self.o = matrix("BTNH,NHD->BTD", bias=config.attention_bias)
        self.distance = matrix("RD,DNH->RNH")
        self.content_bias, self.distance_bias = (
            nnx.Param(jnp.zeros((sizes["N"], sizes["H"]), dtype)) for _ in range(2)
        )

    def __call__(self, x_BTD: jax.Array, places: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        """`places` are the waves of distances [R, D], which frames are of a sound [B, T] and which of the batch [S]."""
        x_BTD, (waves_RD, is_sound_BT, is_frame_S) = self.norm(x_BTD), places
        q_BTNH, k_BSNH, v_BSNH = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        product = partial(jnp.einsum, preferred_element_type=jnp.float32)
        by_distance = product("BTNH,RNH->BNTR", q_BTNH + self.distance_bias[...], self.distance(waves_RD))
        by_content = product("BTNH,BSNH->BNTS", q_BTNH + self.content_bias[...], k_BSNH)
        scores = (by_content + by_place(by_distance)) * q_BTNH.shape[-1] ** -0.5
        is_query = is_sound_BT[:, None, :, None]
        is_seen = jnp.where(is_query, is_sound_BT[:, None, None], is_frame_S)
        weights = jax.nn.softmax(jnp.where(is_seen, jnp.where(is_query, scores, 0), MASKED_SCORE), axis=-1)
        return self.o(jnp.einsum("BNTS,BSNH->BTNH", weights.astype(v_BSNH.dtype), v_BSNH))


def by_place(x_BNTR: jax.Array) -> jax.Array:
    """Returns the values [B, N, T, S] of the distance of each frame to each, of the values of the distances T - 1 to
    1 - T (arXiv:1901.02860, appendix B)."""
    B, N, T, R = x_BNTR.shape
    x = jnp.pad(x_BNTR, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(B, N, R + 1, T)
    return x[:, :, 1:].reshape(B, N, T, R)[..., :T]


def distance_waves(frames: int, width: int) -> np.ndarray:
    """Returns a sine and a cosine of each distance [R, D] from `frames` - 1 to its negative, for rates from 1 to nearly
    1/10000 in turn, in float32."""
    exponents = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    rates = np.float32(1) / (10000.0 ** exponents.astype(np.float64)).astype(np.float32)
    angles = np.arange(frames - 1, -frames, -1, dtype=np.float32)[:, None] * rates
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(angles), -1)


class ParakeetLayer(MacaronLayer):
    """One layer, [B, T, D] to [B, T, D]."""

    mlp, attention, convolution, eps = HalvedMLP, ParakeetAttention, SpeechConvolution, SPEECH_EPS


class Featurizer(nnx.Module):
    """Mel filters and window of a spectrogram. They are kept, and nothing reads them: the processor has its own."""

    def __init__(self, sizes: Mapping[str, int]):
        self.filters = nnx.Param(jnp.zeros((sizes["M"], sizes["Q"]), jnp.float32))
        self.window = nnx.Param(jnp.zeros(sizes["S"], jnp.float32))


class Parakeet(FeatureEncoder):
    """Frames [B, T, M] of log-mel spectrograms to features [B, T / 8, O]."""

    takes = ("input_features", SOUND_MASK)
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.featurizer = Featurizer(config.sizes) if config.has_filters else None
        self.entry = SoundEntry(config, nnx.relu, dtype=dtype, keys=keys)
        self.layers = nnx.List([ParakeetLayer(config, dtype=dtype, keys=keys) for _ in range(config.sizes["L"])])

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return random_frames(rng, 45, self.config.sizes["M"])

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        frames_BTM, mels = given(features, "input_features", 3), self.config.sizes["M"]
        B, T, _ = frames_BTM.shape
        is_given = SOUND_MASK in features
        mask_BT = given(features, SOUND_MASK, 2).astype(bool) if is_given else np.ones((B, T), bool)
        if frames_BTM.shape[2] != mels or mask_BT.shape != (B, T):
            raise UsageError(
                f"input_features has shape {frames_BTM.shape} and {SOUND_MASK} {mask_BT.shape}, and the model {mels} "
                "frequencies"
            )
        lengths = mask_BT.sum(axis=1)
        # The reference counts the frame behind the mask too, which the processor leaves out.
        counts = np.minimum(halved(lengths + is_given, 3), halved(T, 3))
        length, rows = bucket(T, multiple=8), padded_rows(B)
        return Prepared(
            (
                np.pad(frames_BTM, [(0, rows - B), (0, length - T), (0, 0)]),
                np.arange(length) < padded(lengths, rows)[:, None],
                np.arange(length) < T,
            ),
            feature_rows(counts, length // 8),
            counts.tolist(),
        )

    def __call__(self, frames_BTM: jax.Array, is_sound_BT: jax.Array, is_frame_T: jax.Array) -> tuple[jax.Array, Deep]:
        x_BTD = self.entry(frames_BTM.astype(self.entry.matrix.kernel.dtype), is_sound_BT)
        D = x_BTD.shape[2]
        x_BTD = x_BTD * (D**0.5 if self.config.scale_input else 1.0)
        is_sound_BT = is_sound_BT[:, ::8]
        waves_RD = jnp.asarray(distance_waves(x_BTD.shape[1], D), x_BTD.dtype)
        places = (waves_RD, is_sound_BT, is_frame_T[::8])
        for layer in self.layers:
            x_BTD = layer(x_BTD, places, is_sound_BT)
        return self.projector(x_BTD), ()


class SoundSquared(SquaredRelu):
    """The projector of sounds, [B, T, D] to [B, T, O]."""

    width = "D"
