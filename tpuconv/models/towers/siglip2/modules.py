"""SigLIP 2 and its kin. The patches of all images are one sequence; patches of one image see each other."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, apply_rope, gelu
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.angles import cos_sin, rows_then_columns
from tpuconv.models.towers.encoder import (
    ACTS_BY_NAME,
    Grids,
    given,
    noise,
    padded,
    patches_by_grid,
    random_patches,
    read_taps,
)
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.places import (
    Taps,
    antialiased_taps,
    as_wide,
    bilinear_taps_of_centers,
    block_order,
    bucket,
    raster,
)
from tpuconv.models.towers.siglip.modules import Siglip


class BlockMatrices(nnx.Module):
    """Joins s x s patches, [B, P, D] to [B, P / s^2, O]: a norm and two matrices follow. Blocks of patches follow each
    other."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, self.joined = config.sizes, config.sizes["M"]
        self.norm = LayerNorm("M", sizes, 1e-5, dtype=dtype) if config.projector_use_layernorm else None
        self.up = Einsum("BPM,MW->BPW", sizes, bias=config.projector_bias, dtype=dtype, keys=keys)
        self.down = Einsum("BPW,WO->BPO", sizes, bias=config.projector_bias, dtype=dtype, keys=keys)
        self.act = ACTS_BY_NAME[config.projector_hidden_act]

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPM = x_BPD.reshape(len(x_BPD), -1, self.joined)
        return self.down(self.act(self.up(x_BPM if self.norm is None else self.norm(x_BPM))))


class PaddleMatrices(nnx.Module):
    """A norm of each patch, then s x s patches are joined, [B, P, D] to [B, P / s^2, O], and two matrices follow."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, self.joined = config.sizes, config.sizes["M"]
        self.norm = LayerNorm("D", sizes, 1e-5, dtype=dtype)
        self.up = Einsum("BPM,MW->BPW", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BPW,WO->BPO", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.down(gelu(self.up(self.norm(x_BPD).reshape(len(x_BPD), -1, self.joined))))


class Siglip2(Siglip):
    """SigLIP 2: patches [I, P, C] of images, padded to the one with most, to features."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features. `pixel_attention_mask` says what `spatial_shapes` does."""
        return ("pixel_values", "spatial_shapes", "pixel_attention_mask")

    def images(self, features: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
        """Returns the patches of each image in raster order, and its rows and columns."""
        patches_IPC, shapes = given(features, "pixel_values", 3), given(features, "spatial_shapes", 2)
        grids = [(int(h), int(w)) for h, w in shapes]
        if len(patches_IPC) != len(grids) or max(h * w for h, w in grids) > patches_IPC.shape[1]:
            raise UsageError(f"spatial_shapes do not fit the {len(patches_IPC)} images of pixel_values")
        return [each[: h * w] for each, (h, w) in zip(patches_IPC, grids, strict=True)], grids

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        shapes = np.array(grids) * self.merge()
        mask = np.arange(shapes.prod(axis=1).max()) < shapes.prod(axis=1)[:, None]
        patches = noise(rng, *mask.shape, self.config.sizes["C"]) * mask[..., None]
        return {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": mask}

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size * self.merge())

    def taps(self, h: int, w: int) -> Taps:
        """Returns which learned positions the patches of an image of h x w read, in raster order."""
        return antialiased_taps(h, w, self.config.side, self.config.side)

    def merge(self) -> int:
        """Returns the number of patches that the projector joins along each side."""
        merge: int = self.config.merge
        return merge

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches, grids = self.images(features)
        s, taps = self.merge(), [self.taps(h, w) for h, w in grids]
        orders = [block_order(h, w, s) for h, w in grids]
        size = bucket(sum(map(len, orders)), multiple=s * s)

        def joined(arrays: list[Any], value: float = 0) -> np.ndarray:
            """Returns arrays of images one after the other, in the order of the tower."""
            return padded(np.concatenate([x[order] for x, order in zip(arrays, orders, strict=True)]), size, value)

        arrays = (
            joined(patches),
            joined(as_wide([each.index_PA for each in taps])),
            joined(as_wide([each.weight_PA for each in taps])),
            joined([raster(h, w) for h, w in grids]),
            joined([np.full(h * w, i, np.int32) for i, (h, w) in enumerate(grids)], -1),
        )
        counts = [h * w // s**2 for h, w in grids]
        return Prepared(arrays, np.arange(sum(counts)), counts, [(1, h // s, w // s) for h, w in grids])

    def turns(self, at_P2: jax.Array) -> Any:
        """Returns the angles by which queries and keys turn."""
        return None

    def __call__(  # type: ignore[override]
        self,
        patches_PC: jax.Array,
        index_PA: jax.Array,
        weight_PA: jax.Array,
        at_P2: jax.Array,
        image_P: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.patch(patches_PC[None].astype(self.patch.kernel.dtype))
        x_BPD = x_BPD + read_taps(self.positions[...], index_PA, weight_PA).astype(x_BPD.dtype)
        wanted, turns = self.config.feature_layers, self.turns(at_P2)
        return self.projector(states_of(self.layers, x_BPD, image_P[None], turns, wanted=wanted, norm=self.norm)), ()


def frames_by_grid(features: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], list[tuple[int, int, int]]]:
    """Returns the patches [P, C] of each frame, and the grid (frames, rows, columns) of each image.

    Raises:
        UsageError: the grids do not fit the patches.
    """
    patches_PC, grids = patches_by_grid(features, 2, 4)
    sizes = [h * w for t, h, w in grids.tolist() for _ in range(t)]
    return np.split(patches_PC, np.cumsum(sizes)[:-1]), [(t, h, w) for t, h, w in grids.tolist()]


class PaddleVit(Siglip2):
    """The tower of PaddleOCR-VL: patches [P, X, Y, X] of images of any size, row by row, with learned and with rotary
    positions."""

    rotate = staticmethod(apply_rope)

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features."""
        return ("pixel_values", "image_grid_thw")

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        return random_patches(rng, grids, self.merge(), 3, self.config.patch_size, self.config.patch_size)

    def images(self, features: Mapping[str, np.ndarray]) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
        frames, grids = frames_by_grid(features)
        return frames, [(h, w) for t, h, w in grids for _ in range(t)]

    def taps(self, h: int, w: int) -> Taps:
        return bilinear_taps_of_centers(h, w, self.config.side, self.config.side)

    def merge(self) -> int:
        merge: int = self.config.spatial_merge_size
        return merge

    def turns(self, at_P2: jax.Array) -> Any:
        return cos_sin(rows_then_columns(at_P2[None], self.config.sizes["H"], self.config.rope_theta))


class VideoLlamaVit(Siglip):
    """The tower of VideoLLaMA 3: patches [P, C] of images of any size in blocks of as many as are averaged."""

    rotate = staticmethod(apply_rope)

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features."""
        return ("pixel_values", "image_grid_thw", "image_merge_sizes")

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        merges = np.array([1 + i % 2 for i in range(len(grids))])
        patches = [(h * s, w * s) for (h, w), s in zip(grids, merges.tolist(), strict=True)]
        return {**random_patches(rng, patches, 1, self.config.sizes["C"]), "image_merge_sizes": merges}

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        frames, grids = frames_by_grid(features)
        merges = given(features, "image_merge_sizes", 1).tolist()
        places: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        index, weight, counts, first = [], [], [], 0
        for (t, h, w), s in zip(grids, merges, strict=True):
            order, taps = block_order(h, w, s), bilinear_taps_of_centers(h // s, w // s, h, w)
            place_of = np.argsort(order).astype(np.int32)  # where each patch of the raster is
            for _ in range(t):
                places.append(raster(h, w)[order])
                numbers.append(np.full(h * w, len(numbers), np.int32))
                index.append(first + place_of[taps.index_PA])
                weight.append(taps.weight_PA)
                first += h * w
            counts.append(t * len(taps.index_PA))
        size, features_size = bucket(first), bucket(sum(counts))
        arrays = (
            padded(np.concatenate(frames), size),
            padded(np.concatenate(places), size),
            padded(np.concatenate(numbers), size, -1),
            padded(np.concatenate(index), features_size),
            padded(np.concatenate(weight), features_size),
        )
        return Prepared(arrays, np.arange(sum(counts)), counts)

    def __call__(  # type: ignore[override]
        self,
        patches_PC: jax.Array,
        at_P2: jax.Array,
        image_P: jax.Array,
        index_XA: jax.Array,
        weight_XA: jax.Array,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.patch(patches_PC[None].astype(self.patch.kernel.dtype))
        turns = cos_sin(rows_then_columns(at_P2[None], self.config.sizes["H"], self.config.rope_theta))
        x_BPD = states_of(self.layers, x_BPD, image_P[None], turns, wanted=(), norm=self.norm)
        x_XD = read_taps(x_BPD[0], index_XA, weight_XA).astype(x_BPD.dtype)
        return self.projector(x_XD[None]), ()
