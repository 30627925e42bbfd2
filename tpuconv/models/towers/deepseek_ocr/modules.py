"""The encoders of DeepSeek-OCR and DeepSeek-OCR 2.

Letters: B images or tiles, T tiles of an image, Y and X rows and columns, E channels, P patches, in DeepSeek-OCR 2 the
queries behind them, J features of two encoders side by side, D width, O width of the text model.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from math import isqrt, prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, apply_rope, normal
from tpuconv.models.common.rope import Rope
from tpuconv.models.common.seen import Deep, Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.angles import cos_sin
from tpuconv.models.towers.clip.modules import ClipParts, with_class_token
from tpuconv.models.towers.deepseek_ocr.family import FEW_QUERIES, MANY_QUERIES
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, Grids, given, noise, padded
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.sam.modules import Sam, convolution, rows_left
from tpuconv.models.towers.vit import MLP, Attention, Block

WHOLE_IMAGES, IMAGE_TILES, TILES_OF_EACH = "pixel_values", "pixel_values_local", "num_local_patches"
"""The features that the processors return."""
TILE_GRIDS = "patches_grid"
"""The columns and rows of tiles of each image, which the processor of DeepSeek-OCR returns too."""


class SeparatedMatrix(nnx.Module):
    """A matrix of each query [B, P, D] to [B, P, O], and the vector behind an image."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BPD,DO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.separator = nnx.Param(normal(keys(), (config.sizes["O"],), dtype))

    def between(self) -> jax.Array:
        """The vectors [V, O] that stand between features."""
        return self.separator[...][None]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.matrix(x_BPD)


class EndedMatrix(nnx.Module):
    """A matrix of each patch [B, P, J] to [B, P, O], and the vectors behind an image and behind a row."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BPJ,JO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.newline, self.separator = (nnx.Param(normal(keys(), (config.sizes["O"],), dtype)) for _ in range(2))

    def between(self) -> jax.Array:
        """The vectors [V, O] that stand between features."""
        return jnp.stack([self.separator[...], self.newline[...]])

    def __call__(self, x_BPJ: jax.Array) -> jax.Array:
        return self.matrix(x_BPJ)


class OcrEncoder(FeatureEncoder):
    """Images [B, 3, Y, X] of one size, and tiles of others, to features: the projector's vectors, then of each image,
    then of each tile. SAM's patches are made fewer by two convolutions.

    Attributes:
        most_tiles: the tiles that the processor of the release cuts a large image into, at most.
        share: the side of a tile by the side of an image, in the release.
        vectors: how many vectors the projector has, the one behind an image first.
    """

    takes: ClassVar[tuple[str, ...]] = (WHOLE_IMAGES, IMAGE_TILES, TILES_OF_EACH)
    most_tiles: ClassVar[int]
    share: ClassVar[Fraction]
    vectors: ClassVar[int] = 1
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes, sam = config.sizes, config.sam
        self.sam = Sam(sam, dtype=dtype, keys=keys)
        self.first = convolution(sizes["E"], sizes["M"], dtype=dtype, keys=keys)
        self.last = convolution(sizes["M"], sizes["D"], dtype=dtype, keys=keys)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        return self.random_tiles(rng, [2, *[0] * (len(grids) - 1)])

    def usual_images(self, count: int) -> dict[str, np.ndarray]:
        return self.random_tiles(np.random.default_rng(0), [self.most_tiles] * count)

    def random_tiles(self, rng: np.random.Generator, counts: list[int]) -> dict[str, np.ndarray]:
        """Returns random features of images of the size of SAM's positions, with so many tiles of each."""
        sam = self.config.sam
        side, tile = sam.image_size, max(1, int(sam.side * self.share)) * sam.patch_size
        images = {WHOLE_IMAGES: noise(rng, len(counts), 3, side, side), TILES_OF_EACH: np.array(counts)}
        return images | ({IMAGE_TILES: noise(rng, sum(counts), 3, tile, tile)} if sum(counts) else {})

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        arrays = [given(features, WHOLE_IMAGES, 4)]
        counts = np.zeros(len(arrays[0]), int)
        if len(features.get(IMAGE_TILES, ())):
            arrays.append(given(features, IMAGE_TILES, 4))
            counts = given(features, TILES_OF_EACH, 1)
            if [len(counts), int(counts.sum())] != (numbers := [len(each) for each in arrays]):
                raise UsageError(
                    f"{TILES_OF_EACH} has {int(counts.sum())} tiles of {len(counts)} images, "
                    f"{IMAGE_TILES} has {numbers[1]} and {WHOLE_IMAGES} {numbers[0]}"
                )
        arrays = [padded(each, padded_rows(len(each))) for each in arrays]
        image, tile = (self.raster(*each.shape[2:]) for each in (arrays[0], arrays[-1]))
        rows: list[np.ndarray] = []
        first, found = self.vectors + len(arrays[0]) * prod(image), []
        for number, (tiles, columns) in enumerate(zip(counts.tolist(), self.columns(features, counts), strict=True)):
            tiles_TYX = first + np.arange(tiles * prod(tile)).reshape(tiles, *tile)
            image_TYX = self.vectors + number * prod(image) + np.arange(prod(image)).reshape(1, *image)
            each = [self.in_order(tiles_TYX, columns), self.in_order(image_TYX, 1), np.zeros(1, int)]
            rows += each
            found.append(sum(map(len, each)))
            first += tiles_TYX.size
        return Prepared(tuple(arrays), np.concatenate(rows), found)

    def left(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns that the convolutions leave of the patches of an image of this size."""
        rows, columns = (rows_left(rows_left(side // self.config.sam.patch_size)) for side in (height, width))
        return rows, columns

    def raster(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of the features of an image of this size."""
        raise NotImplementedError

    def columns(self, features: Mapping[str, np.ndarray], counts: np.ndarray) -> list[int]:
        """Returns how many tiles of each image, of which it has so many, stand side by side."""
        return [1] * len(counts)

    def in_order(self, places_TYX: np.ndarray, columns: int) -> np.ndarray:
        """Returns the places of features, and of vectors between them, in the order of the text.

        Args:
            places_TYX: the places of the features of tiles.
            columns: how many tiles stand side by side.
        """
        return places_TYX.reshape(-1)

    def reduced(self, pixels_BCYX: jax.Array) -> jax.Array:
        """Returns what the convolutions make of SAM's features [B, Y, X, D]."""
        return self.last(self.first(self.sam.neck(self.sam(pixels_BCYX)[-1])))

    def encoded(self, pixels_BCYX: jax.Array) -> jax.Array:
        """Returns the features [B, P, O] of images of one size."""
        raise NotImplementedError

    def __call__(self, *images: jax.Array) -> tuple[jax.Array, Deep]:
        vectors_VO = self.projector.between()
        features = [self.encoded(each).reshape(-1, vectors_VO.shape[1]) for each in images]
        return jnp.concatenate([vectors_VO, *features]), ()


class OcrDecoder(OcrEncoder):
    """The encoder of DeepSeek-OCR 2. SAM's patches see each other; the queries behind them see all patches, and the
    queries before."""

    most_tiles = 6
    share = Fraction(3, 4)

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        sizes = config.sizes
        norm = partial(RMSNorm, "D", sizes, config.rms_norm_eps, dtype=dtype)
        attention = partial(Attention, config, out_bias=False, rotate=apply_rope, kv="K", sees_before=True)
        mlp = partial(MLP, config, ACTS_BY_NAME[config.hidden_act], gated=True, bias=False)
        self.layers = nnx.List(
            [
                Block(config, norm, attention(dtype=dtype, keys=keys), mlp(dtype=dtype, keys=keys), dtype=dtype)
                for _ in range(sizes["L"])
            ]
        )
        self.norm = norm()
        self.few = nnx.Param(normal(keys(), (sizes["Y"], sizes["D"]), dtype))
        self.many = nnx.Param(normal(keys(), (sizes["Z"], sizes["D"]), dtype))

    def raster(self, height: int, width: int) -> tuple[int, int]:
        return 1, self.queries(height, width)

    def queries(self, height: int, width: int) -> int:
        """Returns the number of queries of an image of this size."""
        return FEW_QUERIES if prod(self.left(height, width)) <= FEW_QUERIES else MANY_QUERIES

    def encoded(self, pixels_BCYX: jax.Array) -> jax.Array:
        x_BYXD = self.reduced(pixels_BCYX)
        B, D = len(x_BYXD), x_BYXD.shape[-1]
        x_BPD = x_BYXD.reshape(B, -1, D)
        patches = x_BPD.shape[1]
        query_PD = (self.few if self.queries(*pixels_BCYX.shape[2:]) == FEW_QUERIES else self.many)[...]
        x_BPD = jnp.concatenate([x_BPD, jnp.broadcast_to(query_PD, (B, *query_PD.shape))], axis=1)
        place_P = np.arange(x_BPD.shape[1])
        segment_BP = jnp.broadcast_to(np.maximum(place_P - patches + 1, 0), (B, len(place_P)))
        rates_A, _ = Rope(theta=self.config.rope_theta).inverse_frequencies(self.config.sizes["H"])
        turns = cos_sin(jnp.asarray(place_P[None, :, None] * rates_A), x_BPD.dtype)
        for layer in self.layers:
            x_BPD = layer(x_BPD, segment_BP, turns)
        features_BPO: jax.Array = self.projector(self.norm(x_BPD[:, patches:]))
        return features_BPO


class OcrClip(ClipParts, OcrEncoder):
    """The encoder of DeepSeek-OCR: CLIP has SAM's features in place of its patches, and the projector reads both side
    by side. Each row of an image, and each row of all its tiles together, ends with a vector."""

    takes = (*OcrEncoder.takes, TILE_GRIDS)
    most_tiles = 9
    share = Fraction(5, 8)
    vectors = 2

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.build_parts(config, dtype, keys)

    def random_tiles(self, rng: np.random.Generator, counts: list[int]) -> dict[str, np.ndarray]:
        rows = [max(1, isqrt(tiles)) for tiles in counts]
        grids = [(max(1, tiles // each), each) for tiles, each in zip(counts, rows, strict=True)]
        return {**super().random_tiles(rng, counts), TILE_GRIDS: np.array(grids)}

    def raster(self, height: int, width: int) -> tuple[int, int]:
        return self.left(height, width)

    def columns(self, features: Mapping[str, np.ndarray], counts: np.ndarray) -> list[int]:
        if not counts.any():
            return super().columns(features, counts)
        grids = given(features, TILE_GRIDS, 2)
        if len(grids) != len(counts) or not ((grids > 0).all() and (grids.prod(axis=1) == counts)[counts > 0].all()):
            raise UsageError(f"{TILE_GRIDS} has the columns and rows {grids.tolist()} of {counts.tolist()} tiles")
        return [int(columns) for columns in grids[:, 0]]

    def in_order(self, places_TYX: np.ndarray, columns: int) -> np.ndarray:
        T, Y, X = places_TYX.shape
        rows = places_TYX.reshape(-1, columns, Y, X).swapaxes(1, 2).reshape(T // columns * Y, columns * X)
        return np.pad(rows, [(0, 0), (0, 1)], constant_values=1).reshape(-1)

    def encoded(self, pixels_BCYX: jax.Array) -> jax.Array:
        x_BYXD = self.reduced(pixels_BCYX)
        B, Y, X, D = x_BYXD.shape
        positions_PD, side = self.positions[...], self.config.side
        table_YXD = Sam.in_size(positions_PD[1:].reshape(side, side, D), Y, X)
        positions_PD = jnp.concatenate([positions_PD[:1], table_YXD.reshape(Y * X, D)])
        x_BPD = x_BYXD.reshape(B, Y * X, D)
        y_BPD = self.pre_norm(with_class_token(self.class_token[...], x_BPD) + positions_PD)
        y_BPD = states_of(self.layers, y_BPD, jnp.zeros(y_BPD.shape[:2], jnp.int32), wanted=())
        features_BPO: jax.Array = self.projector(jnp.concatenate([y_BPD[:, 1:], x_BPD], axis=-1))
        return features_BPO
