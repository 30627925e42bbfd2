"""The tower of Phi-3-vision, and its projector.

Letters: I images, B tiles of all images, X features of all images.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, gelu, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.clip.modules import Clip
from tpuconv.models.towers.encoder import Grids, given, noise, padded
from tpuconv.models.towers.image_encoder import joined_squares, states_of
from tpuconv.models.towers.phi4.modules import tile_grids, tiles_in_order
from tpuconv.models.towers.places import bucket

IMAGE_PIXELS, PIXELS_OF_EACH = "pixel_values", "image_sizes"


class Phi3Clip(Clip):
    """Images as one tile of the whole and tiles of parts [I, tiles, X, Y, X], of which those at the end may be padding,
    to features [X, O]. `image_sizes` are the rows and columns of pixels that the parts have together."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features."""
        return IMAGE_PIXELS, PIXELS_OF_EACH

    @property
    def pixels_per_feature(self) -> int:
        return 2 * int(self.config.patch_size)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        k, size = self.config.side // 2, self.config.image_size
        counts = [(-(-h // k), -(-w // k)) for h, w in grids]
        tiles = 1 + max(map(prod, counts))
        pixels = noise(rng, len(grids), tiles, self.config.num_channels, size, size)
        return {IMAGE_PIXELS: pixels, PIXELS_OF_EACH: np.array(counts) * size}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels, sizes = given(features, IMAGE_PIXELS, 5), given(features, PIXELS_OF_EACH, 2)
        size = self.config.image_size
        if pixels.shape[3:] != (size, size) or len(pixels) != len(sizes):
            raise UsageError(
                f"{IMAGE_PIXELS} has shape {pixels.shape} for {len(sizes)} images, and tiles of the model are "
                f"{size} x {size}"
            )
        k, tiles, index, first = self.config.side // 2, [], [], 2
        grids = tile_grids(IMAGE_PIXELS, pixels, PIXELS_OF_EACH, sizes, size)
        for image, (h, w) in zip(pixels, grids, strict=True):
            tiles.append(image[: 1 + h * w])
            index.append(tiles_in_order(h, w, k, first))
            first += (1 + h * w) * k * k
        pixels_BCYX, index_X = np.concatenate(tiles), np.concatenate(index)
        return Prepared(
            (padded(pixels_BCYX, padded_rows(len(pixels_BCYX))), padded(index_X, bucket(len(index_X)))),
            np.arange(len(index_X)),
            [len(each) for each in index],
        )

    def __call__(self, pixels_BCYX: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.embedded(pixels_BCYX)
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        x_BPD = states_of(self.layers, x_BPD, segment_BP, wanted=self.config.feature_layers)
        return self.projector(x_BPD[:, 1:], *arrays), ()


class Phi3ImageEnds(nnx.Module):
    """Blocks of 2 x 2 patches of tiles [B, P, D], put in order with vectors between them [X, M], and two matrices
    [X, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, self.side = config.sizes, config.side
        self.row_end, self.between = (nnx.Param(normal(keys(), (sizes["M"],), dtype)) for _ in range(2))
        self.up = Einsum("XM,MA->XA", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("XA,AO->XO", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BPD: jax.Array, index_X: jax.Array) -> jax.Array:
        joined_BPM = joined_squares(x_BPD, self.side, self.side, 2)
        joined_XM = joined_BPM.reshape(-1, joined_BPM.shape[-1])
        ends_XM = jnp.stack([self.row_end[...], self.between[...]]).astype(joined_XM.dtype)
        return self.down(gelu(self.up(jnp.concatenate([ends_XM, joined_XM])[index_X])))
