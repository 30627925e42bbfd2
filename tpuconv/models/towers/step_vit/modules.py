"""The vision encoder of Step-3.7."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.angles import columns_then_rows, cos_sin
from tpuconv.models.towers.encoder import (
    ACTS_BY_NAME,
    FeatureEncoder,
    Grids,
    check_squares,
    given,
    noise,
    padded,
    patches_of,
    read_taps,
)
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.places import bilinear_taps_of_centers, raster
from tpuconv.models.towers.sam.modules import convolution, rows_left
from tpuconv.models.towers.vit import turning_layers

LOCAL_TILES, TILE_COUNTS = "pixel_values_local", "num_local_patches"


class StepMatrix(nnx.Module):
    """A matrix, [B, P, Z] to [B, P, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BPZ,ZO->BPO", config.sizes, bias=config.projector_bias, dtype=dtype, keys=keys)

    def __call__(self, x_BPZ: jax.Array) -> jax.Array:
        return self.matrix(x_BPZ)


class StepVit(FeatureEncoder):
    """Images [B, C, Y, X] of one size, and tiles of them of another size, to features: of an image the features of its
    tiles, then its own."""

    takes = ("pixel_values", LOCAL_TILES, TILE_COUNTS)
    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        norm = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        self.patch = Einsum("BPC,CD->BPD", sizes, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.pre_norm = norm()
        act = ACTS_BY_NAME[config.hidden_act]
        self.layers = turning_layers(config, norm, act, scaled=True, dtype=dtype, keys=keys)
        self.first = convolution(sizes["D"], sizes["M"], bias=True, dtype=dtype, keys=keys)
        self.last = convolution(sizes["M"], sizes["Z"], bias=True, dtype=dtype, keys=keys)

    def tokens(self, side: int) -> int:
        """Returns the number of features of an image with so many pixels a side."""
        return rows_left(rows_left(side // self.config.patch_size)) ** 2

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels_BCYX = given(features, "pixel_values", 4)
        check_squares(pixels_BCYX, self.config.tower.image_size)
        images = len(pixels_BCYX)
        arrays = [padded(pixels_BCYX, padded_rows(images))]
        tiles, each, counts = 0, 0, [0] * images
        if LOCAL_TILES in features:
            tiles_BCYX = given(features, LOCAL_TILES, 4)
            tiles, each = len(tiles_BCYX), self.tokens(tiles_BCYX.shape[2])
            arrays.append(padded(tiles_BCYX, padded_rows(tiles)))
            counts = given(features, TILE_COUNTS, 1).tolist()
        if len(counts) != images or sum(counts) != tiles:
            raise UsageError(f"{TILE_COUNTS}={counts} of {images} images, {LOCAL_TILES} has {tiles} tiles")
        whole = self.tokens(self.config.tower.image_size)
        rows, first = [], len(arrays[0]) * whole  # tiles are behind all images
        for image, count in enumerate(counts):
            rows += [first + np.arange(count * each), image * whole + np.arange(whole)]
            first += count * each
        return Prepared(tuple(arrays), np.concatenate(rows), [count * each + whole for count in counts])

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        side, patch = self.config.tower.image_size, self.config.patch_size
        tile, counts = max(1, 2 * side // 3 // patch) * patch, np.array([2] + [0] * (len(grids) - 1))
        return {
            "pixel_values": noise(rng, len(grids), 3, side, side),
            LOCAL_TILES: noise(rng, 2, 3, tile, tile),
            TILE_COUNTS: counts,
        }

    def encoded(self, pixels_BCYX: jax.Array) -> jax.Array:
        """Returns the features [B, P, O] of images or tiles."""
        patch, table = self.config.patch_size, self.config.side
        h, w = (side // patch for side in pixels_BCYX.shape[2:])
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), patch))
        if h == w == table:
            at_PD = self.positions[...]
        else:
            taps = bilinear_taps_of_centers(h, w, table, table)
            at_PD = read_taps(self.positions[...], jnp.asarray(taps.index_PA), jnp.asarray(taps.weight_PA))
        x_BPD = self.pre_norm(x_BPD + at_PD.astype(x_BPD.dtype))
        turns = cos_sin(columns_then_rows(raster(h, w)[None], self.config.sizes["H"], self.config.rope_theta))
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        x_BPD = states_of(self.layers, x_BPD, segment_BP, turns, wanted=())
        x_BYXZ = self.last(self.first(x_BPD.reshape(len(x_BPD), h, w, -1)))
        x_BPO: jax.Array = self.projector(x_BYXZ.reshape(len(x_BYXZ), -1, x_BYXZ.shape[-1]))
        return x_BPO

    def __call__(self, *pixels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        features = [self.encoded(each) for each in pixels]
        return jnp.concatenate([each.reshape(-1, each.shape[-1]) for each in features]), ()
