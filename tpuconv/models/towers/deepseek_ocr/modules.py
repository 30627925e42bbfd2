"""The encoder of DeepSeek-OCR 2.

Letters: B images or tiles, Y and X rows and columns, E channels, P patches and the queries behind them, D width, O
width of the text model.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

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
from tpuconv.models.towers.deepseek_ocr.family import FEW_QUERIES, MANY_QUERIES
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, Grids, given, noise, padded
from tpuconv.models.towers.sam.modules import Sam, convolution, rows_left
from tpuconv.models.towers.vit import MLP, Attention, Block

MOST_TILES = 6
"""The tiles that the processor of the release cuts a large image into, at most."""
WHOLE_IMAGES, IMAGE_TILES, TILES_OF_EACH = "pixel_values", "pixel_values_local", "num_local_patches"
"""The features that the processor returns."""


class SeparatedMatrix(nnx.Module):
    """A matrix of each query [B, P, D] to [B, P, O], and the vector behind an image."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BPD,DO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.separator = nnx.Param(normal(keys(), (config.sizes["O"],), dtype))

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.matrix(x_BPD)


class OcrDecoder(FeatureEncoder):
    """Images [B, 3, Y, X] of one size, and tiles of others, to features: of the separator, then of each image, then of
    each tile. SAM's patches, made fewer by two convolutions, see each other; the queries behind them see all patches,
    and the queries before."""

    takes = (WHOLE_IMAGES, IMAGE_TILES, TILES_OF_EACH)
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes, sam = config.sizes, config.sam
        self.sam = Sam(sam, dtype=dtype, keys=keys)
        self.first = convolution(sizes["E"], sizes["M"], dtype=dtype, keys=keys)
        self.last = convolution(sizes["M"], sizes["D"], dtype=dtype, keys=keys)
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

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        return self.random_tiles(rng, [2, *[0] * (len(grids) - 1)])

    def usual_images(self, count: int) -> dict[str, np.ndarray]:
        return self.random_tiles(np.random.default_rng(0), [MOST_TILES] * count)

    def random_tiles(self, rng: np.random.Generator, counts: list[int]) -> dict[str, np.ndarray]:
        """Returns random features of images of the size of SAM's positions, and as many tiles of three quarters of
        that."""
        sam = self.config.sam
        side, tile = sam.image_size, max(1, 3 * sam.side // 4) * sam.patch_size
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
        of_image, of_tile = (self.queries(*each.shape[2:]) for each in (arrays[0], arrays[-1]))
        rows: list[np.ndarray] = []
        first, found = 1 + len(arrays[0]) * of_image, []
        for number, tiles in enumerate(counts.tolist()):
            of_tiles = np.arange(first, first + tiles * of_tile)
            image = 1 + number * of_image + np.arange(of_image)
            rows += [of_tiles, image, np.zeros(1, int)]
            found.append(len(of_tiles) + of_image + 1)
            first += len(of_tiles)
        return Prepared(tuple(arrays), np.concatenate(rows), found)

    def queries(self, height: int, width: int) -> int:
        """Returns the number of queries of an image of this size."""
        rows, columns = (rows_left(rows_left(side // self.config.sam.patch_size)) for side in (height, width))
        return FEW_QUERIES if rows * columns <= FEW_QUERIES else MANY_QUERIES

    def encoded(self, pixels_BCYX: jax.Array) -> jax.Array:
        """Returns the features [B, P, O] of the queries of images of one size."""
        x_BYXE = self.sam.neck(self.sam(pixels_BCYX)[-1])
        x_BYXD = self.last(self.first(x_BYXE))
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

    def __call__(self, *images: jax.Array) -> tuple[jax.Array, Deep]:
        separator_O = self.projector.separator[...]
        features = [self.encoded(each).reshape(-1, len(separator_O)) for each in images]
        return jnp.concatenate([separator_O[None], *features]), ()
