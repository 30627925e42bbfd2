"""The encoders of Phi-4-multimodal.

Letters: I images, B tiles of all images, P patches of a tile, X features of all images; of sounds T frames, Z windows
of them, Q frames of a window and S the same as keys, M, C, W, G, E, K, J, R and c as `Phi4SoundConfig` has them.
"""

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, LayerNorm, gelu, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.conformer.modules import MacaronLayer
from tpuconv.models.towers.convolutions import SoundEntry, convolved_channels
from tpuconv.models.towers.encoder import (
    ACTS_BY_NAME,
    FeatureEncoder,
    Grids,
    feature_rows,
    given,
    noise,
    padded,
    patches_of,
)
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.places import IntArray, bucket, nearest_taps
from tpuconv.models.towers.qwen_audio.family import halved
from tpuconv.models.towers.siglip.modules import Siglip

PIXELS, SIZES, REAL_PATCHES = "image_pixel_values", "image_sizes", "image_attention_mask"


def tile_grids(pixels: str, images: np.ndarray, sizes: str, sizes_I2: np.ndarray, side: int) -> list[tuple[int, int]]:
    """Returns the rows and columns of the tiles of each image.

    Args:
        pixels, sizes: the names of both features, for errors.
        images: the whole image of each, then its tiles, filled up to the most of the batch [I, tiles, ...].
        sizes_I2: the pixels of all tiles of each image together, down and across.
        side: pixels of a side of a tile.

    Raises:
        UsageError: an image has other tiles.
    """
    grids = []
    for number, (image, (height, width)) in enumerate(zip(images, sizes_I2.tolist(), strict=True)):
        h, w = height // side, width // side
        if not 0 < h * w < len(image):
            raise UsageError(
                f"image {number} has {height} x {width} pixels by {sizes}, which are {h} x {w} tiles, and {pixels} has "
                f"{len(image) - 1} beside the whole"
            )
        grids.append((h, w))
    return grids


def tiles_in_order(h: int, w: int, k: int, first: int, is_real_BYX: np.ndarray | None = None) -> IntArray:
    """Returns the numbers of an image's features in their order: h x w tiles row by row, without padding, then the
    whole. Each has k x k features.

    Args:
        first: the number of the first feature of the whole; 0 is the vector at the ends of rows, 1 the one between.
        is_real_BYX: which patches of the tiles are no padding, two along each side of a feature; all by default.
    """

    def joined(x_BYX: np.ndarray) -> np.ndarray:
        return x_BYX.reshape(h, w, k, k).swapaxes(1, 2).reshape(h * k, w * k)

    is_real = np.ones((h * k, w * k), bool) if is_real_BYX is None else joined(is_real_BYX[:, ::2, ::2])
    rows, columns = int(is_real[:, 0].sum()), int(is_real[0].sum())
    number = np.arange(first, first + (1 + h * w) * k * k, dtype=np.int32).reshape(-1, k, k)
    parts, whole = joined(number[1:])[:rows, :columns], number[0]
    ended = [np.pad(each, ((0, 0), (0, 1))).reshape(-1) for each in (parts, whole)]
    return np.concatenate([ended[0], np.ones(1, np.int32), ended[1]])


class Phi4Vit(Siglip):
    """Images as one tile of the whole and tiles of parts [I, tiles, X, Y, X], of which those at the end may be padding,
    to features [X, O]. Padded patches are no keys, and make no features."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features."""
        return PIXELS, SIZES, REAL_PATCHES

    @property
    def feature_side(self) -> int:
        """The number of features along a side of a tile."""
        return -(-int(self.config.side) // 2)

    @property
    def pixels_per_feature(self) -> int:
        return 2 * int(self.config.patch_size)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        side, k, pixels = self.config.side, self.feature_side, self.config.image_size
        counts = [(-(-h // k), -(-w // k)) for h, w in grids]
        most = 1 + max(map(prod, counts))
        is_real = np.ones((len(grids), most, side, side), bool)
        for image, sizes, tiles in zip(is_real, grids, counts, strict=True):
            row, column = (
                np.concatenate([np.arange(side) < 2 * (size - first) for first in range(0, count * k, k)])
                for size, count in zip(sizes, tiles, strict=True)
            )
            parts = (row[:, None] & column).reshape(tiles[0], side, tiles[1], side).swapaxes(1, 2)
            image[1 : 1 + prod(tiles)] = parts.reshape(-1, side, side)
        return {
            PIXELS: noise(rng, len(grids), most, self.config.num_channels, pixels, pixels),
            SIZES: np.array(counts) * pixels,
            REAL_PATCHES: is_real,
        }

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels, sizes = given(features, PIXELS, 5), given(features, SIZES, 2)
        is_real, side, size = given(features, REAL_PATCHES, 4).astype(bool), self.config.side, self.config.image_size
        if pixels.shape[2:] != (self.config.num_channels, size, size) or is_real.shape[2:] != (side, side):
            raise UsageError(
                f"{PIXELS} has shape {pixels.shape} and {REAL_PATCHES} {is_real.shape}, and tiles of the model have "
                f"{self.config.num_channels} x {size} x {size} pixels and {side} x {side} patches"
            )
        tiles, masks, index, first = [], [], [], 2
        grids = tile_grids(PIXELS, pixels, SIZES, sizes, size)
        for image, mask, (h, w) in zip(pixels, is_real, grids, strict=True):
            tiles.append(image[: 1 + h * w])
            masks.append(mask[: 1 + h * w])
            index.append(tiles_in_order(h, w, self.feature_side, first, mask[1 : 1 + h * w]))
            first += (1 + h * w) * self.feature_side**2
        pixels_BCYX, is_key_BYX = np.concatenate(tiles), np.concatenate(masks)
        places_BYX = np.zeros(is_key_BYX.shape, np.int32)
        for place, is_key in zip(places_BYX, is_key_BYX, strict=True):
            if is_key.any():
                rows, columns = int(is_key[:, 0].sum()), int(is_key[0].sum())
                place[:rows, :columns] = nearest_taps(rows, columns, side, side).index_PA.reshape(rows, columns)
                place[~is_key] = 0
        B, index_X = len(pixels_BCYX), np.concatenate(index)
        arrays = (pixels_BCYX, places_BYX.reshape(B, -1), is_key_BYX.reshape(B, -1))
        padded_index = padded(index_X, bucket(len(index_X)))
        return Prepared(
            (*(padded(each, padded_rows(B)) for each in arrays), padded_index),
            np.arange(len(index_X)),
            [len(each) for each in index],
        )

    def __call__(  # type: ignore[override]
        self, pixels_BCYX: jax.Array, places_BP: jax.Array, is_key_BP: jax.Array, index_X: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), self.config.patch_size))
        x_BPD = x_BPD + self.positions[...][places_BP]
        segment_BP, wanted = jnp.zeros(x_BPD.shape[:2], jnp.int32), self.config.feature_layers
        return self.projector(states_of(self.layers, x_BPD, segment_BP, None, is_key_BP, wanted=wanted), index_X), ()


class Phi4ImageEnds(nnx.Module):
    """The mean of 2 x 2 patches of tiles [B, P, D], put in order with vectors between them [X, D], and two matrices
    [X, O]. Of an odd number of rows the last but one stands once more behind the last, and so with columns."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        sizes, self.side = config.sizes, config.side
        self.row_end, self.between = (nnx.Param(normal(keys(), (sizes["D"],), dtype)) for _ in range(2))
        self.up = Einsum("XD,DA->XA", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("XA,AO->XO", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BPD: jax.Array, index_X: jax.Array) -> jax.Array:
        B, _, D = x_BPD.shape
        more = self.side % 2
        x = jnp.pad(x_BPD.reshape(B, self.side, self.side, D), ((0, 0), (0, more), (0, more), (0, 0)), mode="reflect")
        k = x.shape[1] // 2
        pooled_XD = x.reshape(B, k, 2, k, 2, D).mean((2, 4)).reshape(-1, D)
        ends_XD = jnp.stack([self.row_end[...], self.between[...]]).astype(pooled_XD.dtype)
        return self.down(gelu(self.up(jnp.concatenate([ends_XD, pooled_XD])[index_X])))


SOUND_EPS = 1e-5
"""The epsilon of norms. No key has it."""

WINDOW = 500
"""The most features that see each other. Longer sounds are cut into windows, each of which is computed by itself."""

SOUND_FRAMES, SOUND_COUNTS, REAL_FRAMES = "audio_input_features", "audio_embed_sizes", "audio_attention_mask"


class GatedHalf(nnx.Module):
    """A halved, gated MLP behind its norm, [Z, Q, D] to [Z, Q, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        matrix = partial(Einsum, sizes=config.sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", config.sizes, SOUND_EPS, dtype=dtype)
        self.up, self.gate, self.down = matrix("ZQD,DF->ZQF"), matrix("ZQD,DF->ZQF"), matrix("ZQF,FD->ZQD")
        self.act = ACTS_BY_NAME[config.mlp_activation]

    def __call__(self, x_ZQD: jax.Array) -> jax.Array:
        x_ZQD = self.norm(x_ZQD)
        return 0.5 * self.down(self.up(x_ZQD) * self.act(self.gate(x_ZQD)))


class BiasedAttention(nnx.Module):
    """Attention of the frames of a window with a bias [Z, N, Q, S] of its scores, [Z, Q, D] to [Z, Q, D]. Scores are in
    float32."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        matrix = partial(Einsum, sizes=config.sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", config.sizes, SOUND_EPS, dtype=dtype)
        self.q, self.k, self.v = (matrix("ZQD,DNH->ZQNH") for _ in range(3))
        self.o = matrix("ZQNH,NHD->ZQD")

    def __call__(self, x_ZQD: jax.Array, bias_ZNQS: jax.Array) -> jax.Array:
        x_ZQD = self.norm(x_ZQD)
        q_ZQNH, k_ZSNH, v_ZSNH = self.q(x_ZQD), self.k(x_ZQD), self.v(x_ZQD)
        scores = jnp.einsum("ZQNH,ZSNH->ZNQS", q_ZQNH, k_ZSNH, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(scores * q_ZQNH.shape[-1] ** -0.5 + bias_ZNQS, axis=-1).astype(v_ZSNH.dtype)
        return self.o(jnp.einsum("ZNQS,ZSNH->ZQNH", weights, v_ZSNH))


class CausalConvolution(nnx.Module):
    """A gate, a convolution of each channel over the last frames and two matrices, [Z, Q, D] to [Z, Q, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        matrix = partial(Einsum, sizes=sizes, bias=True, dtype=dtype, keys=keys)
        self.norm = LayerNorm("D", sizes, SOUND_EPS, dtype=dtype)
        self.up, self.gate = matrix("ZQD,DE->ZQE"), matrix("ZQD,DE->ZQE")
        self.up_shift, self.gate_shift = (nnx.Param(jnp.zeros(sizes["E"], dtype)) for _ in range(2))
        self.by_channel = ChannelTaps(config, dtype=dtype, keys=keys)
        self.middle, self.down = matrix("ZQK,KJ->ZQJ"), matrix("ZQJ,JD->ZQD")
        self.act, self.gate_act = ACTS_BY_NAME[config.conv_activation], ACTS_BY_NAME[config.gate_activation]

    def __call__(self, x_ZQD: jax.Array) -> jax.Array:
        x_ZQD = self.norm(x_ZQD)
        gate_ZQE = self.gate_act(self.gate(x_ZQD) + self.gate_shift[...])
        y_ZQK = self.by_channel((self.up(x_ZQD) + self.up_shift[...]) * gate_ZQE)
        return self.down(self.act(self.middle(y_ZQK)))


class ChannelTaps(nnx.Module):
    """K / E convolutions of each channel over the last frames, [Z, Q, E] to [Z, Q, K]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.kernel = nnx.Param(normal(keys(), (sizes["c"], sizes["K"]), dtype))
        self.bias = nnx.Param(jnp.zeros(sizes["K"], dtype))
        self.times = sizes["K"] // sizes["E"]

    def __call__(self, x_ZQE: jax.Array) -> jax.Array:
        kernel = self.kernel[...]
        return convolved_channels(jnp.repeat(x_ZQE, self.times, axis=2), kernel, len(kernel) - 1) + self.bias[...]


class Phi4SoundLayer(MacaronLayer):
    """One layer, [Z, Q, D] to [Z, Q, D]."""

    mlp, attention, convolution, eps = GatedHalf, BiasedAttention, CausalConvolution, SOUND_EPS


class Phi4Conformer(FeatureEncoder):
    """Frames [B, T, M] of log-mel spectrograms to features [B, T / 8, O]. As in transformers frames behind a shorter
    sound are seen by all layers."""

    takes = (SOUND_FRAMES, SOUND_COUNTS, REAL_FRAMES)
    beside = (PIXELS,)
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        self.mean, self.scale = nnx.Param(jnp.zeros(sizes["M"], dtype)), nnx.Param(jnp.ones(sizes["M"], dtype))
        self.entry = SoundEntry(config, ACTS_BY_NAME[config.nemo_activation], dtype=dtype, keys=keys)
        self.distance_bias = nnx.Param(normal(keys(), (sizes["R"], sizes["N"]), dtype))
        self.layers = nnx.List([Phi4SoundLayer(config, dtype=dtype, keys=keys) for _ in range(sizes["L"])])

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        mask = np.arange(45) < np.array([[45], [27]])
        return {
            SOUND_FRAMES: noise(rng, 2, 45, self.config.sizes["M"]),
            SOUND_COUNTS: np.array([6, 4]),
            REAL_FRAMES: mask,
        }

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        frames_BTM, counts = given(features, SOUND_FRAMES, 3), given(features, SOUND_COUNTS, 1).tolist()
        (B, T, M), mels = frames_BTM.shape, self.config.sizes["M"]
        length = halved(T, 3)
        if mels != M or len(counts) != B or max(counts, default=0) > length:
            raise UsageError(
                f"{SOUND_FRAMES} has shape {frames_BTM.shape}, and {SOUND_COUNTS} is {counts}; the model has {mels} "
                f"frequencies, and at most {length} features of so many frames"
            )
        windows = max(1, -(-length // WINDOW))
        slots = min(bucket(length, 64), WINDOW) if windows == 1 else WINDOW * padded_rows(windows)
        # What a mask of the reference hides is seen too, with a score that is less by 1.
        extra_BS = np.full((B, slots), MASKED_SCORE, np.float32)
        extra_BS[:, : length if windows == 1 else windows * WINDOW] = 1
        if REAL_FRAMES in features:
            real = halved(given(features, REAL_FRAMES, 2).astype(bool).sum(axis=1), 3)
            extra_BS[(np.arange(slots) >= real[:, None]) & (extra_BS > 0)] = 0
        rows = padded_rows(B)
        return Prepared(
            (
                np.pad(frames_BTM, [(0, rows - B), (0, 8 * slots - T), (0, 0)]),
                np.arange(8 * slots) < T,
                padded(extra_BS, rows),
                np.array([features.get(PIXELS, np.zeros(0)).size > 0]),
            ),
            feature_rows(counts, slots),
            counts,
        )

    def __call__(
        self, frames_BTM: jax.Array, is_frame_T: jax.Array, extra_BS: jax.Array, is_beside_images_1: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BTM = (frames_BTM.astype(self.scale.dtype) - self.mean[...]) * self.scale[...]
        # frames behind the longest sound are 0 for each part
        x_BTD = self.entry(x_BTM * is_frame_T[:, None], is_frame_T[None]) * is_frame_T[::8, None]
        B, slots, D = x_BTD.shape
        Q = min(slots, WINDOW)
        x_ZQD, bias_ZNQS = x_BTD.reshape(-1, Q, D), self._bias(extra_BS.reshape(-1, Q))
        for layer in self.layers:
            x_ZQD = layer(x_ZQD, bias_ZNQS)
        return self.projector(x_ZQD.reshape(B, slots, D), is_beside_images_1), ()

    def _bias(self, extra_ZS: jax.Array) -> jax.Array:
        """Returns what is added to the scores of windows [Z, N, Q, S], of what is added for each key."""
        config, place = self.config, np.arange(extra_ZS.shape[1])
        most = config.bias_max_distance
        distance_QS = np.clip(place - place[:, None], -most, most - 1)
        row_QS = np.abs(distance_QS) if config.bias_symmetric else distance_QS + most
        bias_NQS = self.distance_bias[...][row_QS].astype(jnp.float32).transpose(2, 0, 1)
        if config.chunk_size is None:
            return bias_NQS + extra_ZS[:, None, None]
        chunk = place // config.chunk_size
        ahead_QS = chunk[:, None] - chunk
        is_near_QS = (ahead_QS >= 0) & (ahead_QS <= config.left_chunk)
        extra_ZQS = jnp.where(is_near_QS, extra_ZS[:, None], jnp.minimum(extra_ZS, 0)[:, None])
        return bias_NQS + extra_ZQS[:, None]


class Phi4SoundEnds(nnx.Module):
    """Two matrices, others for sounds beside images, [B, T, D] to [B, T, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.speech, self.beside_images = (SoundMatrices(config, dtype=dtype, keys=keys) for _ in range(2))

    def __call__(self, x_BTD: jax.Array, is_beside_images_1: jax.Array) -> jax.Array:
        return jnp.where(is_beside_images_1, self.beside_images(x_BTD), self.speech(x_BTD))


class SoundMatrices(nnx.Module):
    """Two matrices, [B, T, D] to [B, T, O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.up = Einsum("BTD,DA->BTA", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BTA,AO->BTO", config.sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.down(gelu(self.up(x_BTD)))
