"""The vision encoders of Step-3, Step3-VL and Step-3.7."""

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
from tpuconv.models.towers.convolutions import StridedConvolution
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
    resized,
)
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.places import antialiased_cubic_weights, bilinear_taps_of_centers, raster
from tpuconv.models.towers.sam.modules import convolution, rows_left
from tpuconv.models.towers.vit import MLP, Attention, Block, turning_layers


class StepMatrix(nnx.Module):
    """A matrix, [B, P, Z] to [B, P, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.matrix = Einsum("BPZ,ZO->BPO", config.sizes, bias=config.projector_bias, dtype=dtype, keys=keys)

    def __call__(self, x_BPZ: jax.Array) -> jax.Array:
        return self.matrix(x_BPZ)


class Downsampled(StepMatrix):
    """Two convolutions of rows and columns and a matrix, [B, Y, X, D] to [B, P, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, stride = config.sizes, config.understand_projector_stride
        shape = 2, 2, sizes["D"], sizes["M"]
        self.first = StridedConvolution(shape, stride=stride, pad=0, dtype=dtype, keys=keys)
        self.last = convolution(sizes["M"], sizes["Z"], bias=True, dtype=dtype, keys=keys)
        super().__init__(config, dtype=dtype, keys=keys)

    def __call__(self, x_BYXD: jax.Array) -> jax.Array:
        x_BYXZ = self.last(self.first(x_BYXD))
        return super().__call__(x_BYXZ.reshape(len(x_BYXZ), -1, x_BYXZ.shape[-1]))


class TiledEncoder(FeatureEncoder):
    """Images [B, C, Y, X] of one size, and tiles of them of another size, to features: of an image the features of its
    tiles, then its own."""

    takes = ("pixel_values", "patch_pixel_values", "num_patches")
    config: Any

    def rows(self, side: int) -> int:
        """Returns the rows of features of an image with so many pixels a side."""
        raise NotImplementedError

    def encoded(self, pixels_BCYX: jax.Array) -> jax.Array:
        """Returns the features [B, P, O] of images or tiles."""
        raise NotImplementedError

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        _, local, tile_counts = self.takes
        pixels_BCYX = given(features, "pixel_values", 4)
        check_squares(pixels_BCYX, self.config.tower.image_size)
        images = len(pixels_BCYX)
        arrays = [padded(pixels_BCYX, padded_rows(images))]
        tiles, each, counts = 0, 0, [0] * images
        if local in features:
            tiles_BCYX = given(features, local, 4)
            tiles, each = len(tiles_BCYX), self.rows(tiles_BCYX.shape[2]) ** 2
            arrays.append(padded(tiles_BCYX, padded_rows(tiles)))
            counts = given(features, tile_counts, 1).tolist()
        if len(counts) != images or sum(counts) != tiles:
            raise UsageError(f"{tile_counts}={counts} of {images} images, {local} has {tiles} tiles")
        whole = self.rows(self.config.tower.image_size) ** 2
        rows, first = [], len(arrays[0]) * whole  # tiles are behind all images
        for image, count in enumerate(counts):
            rows += [first + np.arange(count * each), image * whole + np.arange(whole)]
            first += count * each
        return Prepared(tuple(arrays), np.concatenate(rows), [count * each + whole for count in counts])

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        _, local, tile_counts = self.takes
        side, patch = self.config.tower.image_size, self.config.patch_size
        tile, counts = max(1, 2 * side // 3 // patch) * patch, np.array([2] + [0] * (len(grids) - 1))
        return {
            "pixel_values": noise(rng, len(grids), 3, side, side),
            local: noise(rng, 2, 3, tile, tile),
            tile_counts: counts,
        }

    def __call__(self, *pixels: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        features = [self.encoded(each) for each in pixels]
        return jnp.concatenate([each.reshape(-1, each.shape[-1]) for each in features]), ()


class ReleasedStepVit(TiledEncoder):
    """The encoder of Step3-VL-10B and Step-5 Preview."""

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

    def rows(self, side: int) -> int:
        return rows_left(rows_left(side // self.config.patch_size))

    def encoded(self, pixels_BCYX: jax.Array) -> jax.Array:
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


class StepVit(ReleasedStepVit):
    """The encoder of Step-3.7, whose features have other names."""

    takes = ("pixel_values", "pixel_values_local", "num_local_patches")


class NormsBehind(Block):
    """One layer, [B, P, D] to [B, P, D]: attention and MLP, each before its norm, with residual connections."""

    def __call__(
        self, x_BPD: jax.Array, segment_BP: jax.Array, angles: Any = None, is_key_BP: jax.Array | None = None
    ) -> jax.Array:
        x_BPD = x_BPD + self.attn_norm(self.attn(x_BPD, segment_BP))
        y_BPD: jax.Array = self.mlp_norm(self.mlp(x_BPD))
        return x_BPD + y_BPD


CLASS_TOKENS = 4
"""The class token stands so many times before the patches."""


class Step3Vit(TiledEncoder):
    """The encoder of Step-3."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes, act = config.sizes, ACTS_BY_NAME[config.hidden_act]
        norm = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        self.class_token = nnx.Param(normal(keys(), (sizes["D"],), dtype))
        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.layers = nnx.List(
            [
                NormsBehind(
                    config,
                    norm,
                    Attention(config, dtype=dtype, keys=keys),
                    MLP(config, act, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(sizes["L"])
            ]
        )

    def rows(self, side: int) -> int:
        behind_first = (side // self.config.patch_size - 2) // self.config.understand_projector_stride + 1
        return rows_left(behind_first)

    def encoded(self, pixels_BCYX: jax.Array) -> jax.Array:
        patch, table = self.config.patch_size, self.config.side
        h, w = (side // patch for side in pixels_BCYX.shape[2:])
        first_D, at_PD = self.positions[...][0], self.positions[...][1:]
        if not h == w == table:
            weights = (antialiased_cubic_weights(size, table) for size in (h, w))
            at_PD = resized(at_PD.reshape(table, table, -1), *weights).reshape(h * w, -1)
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), patch))
        x_BPD = x_BPD + at_PD.astype(x_BPD.dtype)
        token_BPD = jnp.broadcast_to(self.class_token[...] + first_D, (len(x_BPD), CLASS_TOKENS, x_BPD.shape[-1]))
        x_BPD = jnp.concatenate([token_BPD.astype(x_BPD.dtype), x_BPD], axis=1)
        x_BPD = states_of(self.layers, x_BPD, jnp.zeros(x_BPD.shape[:2], jnp.int32), wanted=())[:, CLASS_TOKENS:]
        x_BPO: jax.Array = self.projector(x_BPD.reshape(len(x_BPD), h, w, -1))
        return x_BPO
