"""The projectors of LLaVA and its kin.

Letters: X features of all images, A features of the tower that one is made of; M width of what is read, A in products
the width between the matrices.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm, normal
from tpuconv.models.towers.encoder import ACTS_BY_NAME, given, noise, padded, read_taps
from tpuconv.models.towers.image_encoder import Arranged
from tpuconv.models.towers.llava.tiles import arrangement, tile_counts
from tpuconv.models.towers.places import bucket


class LlavaMatrices(nnx.Module):
    """Two matrices of each patch, [B, P, M] to [B, P, O].

    Attributes:
        takes: the names of features that it reads, besides the images.
    """

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.config, sizes, bias = config, config.sizes, config.multimodal_projector_bias
        self.up = Einsum("BPM,MA->BPA", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Einsum("BPA,AO->BPO", sizes, bias=bias, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.projector_hidden_act]

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        pixels_BCYX = given(features, "pixel_values", 4)
        return pixels_BCYX, Arranged([self.config.positions - self.config.drops_first] * len(pixels_BCYX))

    def __call__(self, x_BPM: jax.Array) -> jax.Array:
        return self.down(self.act(self.up(x_BPM)))


class VipLlavaMatrices(LlavaMatrices):
    """The same behind a norm."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.norm = LayerNorm("M", config.sizes, config.projector_layernorm_eps, dtype=dtype)

    def __call__(self, x_BPM: jax.Array) -> jax.Array:
        return super().__call__(self.norm(x_BPM))


class Tiles(nnx.Module):
    """Images in tiles, and the order of their features: each row of an image ends with a learned vector.

    Attributes:
        config: of a part whose projector has a `TilesConfig`.
        newline: the vector [O].
    """

    takes: ClassVar[tuple[str, ...]] = ("image_sizes",)
    config: Any
    newline: Any

    @property
    def tile_side(self) -> int:
        """The features along a side of a tile."""
        return int(self.config.side)

    def is_cut(self, features: Mapping[str, np.ndarray], images: int) -> list[bool]:
        """Returns whether each image is cut into tiles."""
        return [True] * images

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the tiles as the tower takes them, and how their features follow each other."""
        config, pixels = self.config, given(features, "pixel_values", 4, 5)
        images = given(features, "image_sizes", 2).tolist()
        sizes, side = config.image_grid_pinpoints, config.tower.image_size
        cut = self.is_cut(features, len(images))
        tiles = [n if is_cut else 1 for n, is_cut in zip(tile_counts(images, sizes, side), cut, strict=True)]
        if pixels.ndim == 5:  # all have as many tiles as the image with most
            pixels = np.concatenate([each[:number] for each, number in zip(pixels, tiles, strict=True)])
        if len(pixels) != sum(tiles):
            raise UsageError(f"pixel_values has {len(pixels)} tiles, images of image_sizes have {sum(tiles)}")
        found = arrangement(images, tiles, sizes, side, self.tile_side, config.most_tiles)
        length = bucket(len(found.index_XA))
        return pixels, Arranged(found.counts, (padded(found.index_XA, length), padded(found.weight_XA, length)))

    def random_tiles(self, rng: np.random.Generator, images: int) -> dict[str, np.ndarray]:
        """Returns random features of images, of three quarters of the width of sizes that they are resized to, the
        largest first."""
        side, by_size = self.config.tower.image_size, sorted(self.config.image_grid_pinpoints, key=prod, reverse=True)
        sizes = [(h, 3 * w // 4) for h, w in (by_size[i % len(by_size)] for i in range(images))]
        tiles = max(tile_counts(sizes, self.config.image_grid_pinpoints, side))
        return {"pixel_values": noise(rng, images, tiles, 3, side, side), "image_sizes": np.array(sizes)}

    def in_rows(self, x_BPO: jax.Array, index_XA: jax.Array, weight_XA: jax.Array) -> jax.Array:
        """Returns the features [X, O] of images, of the features of their tiles."""
        x_XO = jnp.concatenate([self.newline[...].astype(x_BPO.dtype)[None], x_BPO.reshape(-1, x_BPO.shape[-1])])
        return read_taps(x_XO, index_XA, weight_XA).astype(x_BPO.dtype)


class TiledMatrices(Tiles, LlavaMatrices):
    """Two matrices of each patch of tiles [B, P, M], and their features as images have them [X, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.newline = nnx.Param(normal(keys(), (config.sizes["O"],), dtype))

    def __call__(self, x_BPM: jax.Array, index_XA: jax.Array, weight_XA: jax.Array) -> jax.Array:  # type: ignore[override]
        return self.in_rows(super().__call__(x_BPM), index_XA, weight_XA)


class OnevisionMatrices(TiledMatrices):
    """The same; texts with several images have them whole alone."""

    takes = ("image_sizes", "batch_num_images")

    def is_cut(self, features: Mapping[str, np.ndarray], images: int) -> list[bool]:
        if "batch_num_images" not in features:
            return [True] * images
        return [int(n) == 1 for n in given(features, "batch_num_images", 1) for _ in range(int(n))]


class MergingMatrices(nnx.Module):
    """A norm, a matrix that joins s x s patches, and two matrices, [B, P, D] to [B, P / s^2, O]. Blocks of patches
    follow each other."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.sizes, config.multimodal_projector_bias
        self.block = config.merge**2
        self.norm = RMSNorm("D", sizes, config.text_eps, dtype=dtype)
        self.merging = Einsum("BPM,ME->BPE", sizes, dtype=dtype, keys=keys)
        self.up = Einsum("BPE,EA->BPA", sizes, bias=bias, dtype=dtype, keys=keys)
        self.down = Einsum("BPA,AO->BPO", sizes, bias=bias, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.projector_hidden_act]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        B, P, D = x_BPD.shape
        blocks = self.norm(x_BPD).reshape(B, P // self.block, self.block, D).swapaxes(2, 3)  # (channel, row, column)
        return self.down(self.act(self.up(self.merging(blocks.reshape(B, -1, D * self.block)))))
