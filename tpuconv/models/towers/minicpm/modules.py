"""The tower of MiniCPM-V 4.6. The patches of all images are one sequence, in an order in which patches that are joined
stand side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, gelu, gelu_tanh
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.encoder import Grids, given, noise, padded
from tpuconv.models.towers.minicpm.canvas import Markers, canvas_positions
from tpuconv.models.towers.places import bucket, nearest_taps, nested_order
from tpuconv.models.towers.siglip.modules import Siglip
from tpuconv.models.towers.vit import Attention


def patches_side_by_side(
    features: Mapping[str, np.ndarray], sizes_name: str, p: int
) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Returns the patches [P, X p p] of `pixel_values` [1, X, p, P p], one image after the other, and the rows and
    columns of the patches of each, which the feature `sizes_name` has.

    Raises:
        UsageError: a feature is missing, or they do not fit each other.
    """
    pixels, sizes = given(features, "pixel_values", 4)[0], given(features, sizes_name, 2).tolist()
    count = sum(h * w for h, w in sizes)
    if pixels.shape[1:] != (p, p * count):
        raise UsageError(f"pixel_values has patches of {pixels.shape[1:]}, {sizes_name} {count} of {p} x {p}")
    return pixels.reshape(-1, p, count, p).transpose(2, 0, 1, 3).reshape(count, -1), sizes


class Round(nnx.Module):
    """Joins four patches, [B, P, D] to [B, P / 4, O]: a norm and two matrices follow."""

    def __init__(self, config: Any, out: str, *, dtype: DTypeLike, keys: Keys):
        sizes, self.joined = config.sizes, config.sizes["M"]
        self.norm = LayerNorm("M", sizes, 1e-6, dtype=dtype)
        self.up = Einsum("BPM,MA->BPA", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum(f"BPA,A{out}->BP{out}", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        return self.down(gelu(self.up(self.norm(x_BPD.reshape(len(x_BPD), -1, self.joined)))))


class Rounds(nnx.Module):
    """Rounds of joining, [B, P, D] to [B, P / 4^rounds, O]. The last brings patches to the width of the text."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        outs = ["D"] * (config.merger_times - 1) + ["O"]
        self.rounds = nnx.List([Round(config, out, dtype=dtype, keys=keys) for out in outs])

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        for each in self.rounds:
            x_BPD = each(x_BPD)
        return x_BPD


class Inside(nnx.Module):
    """Four patches attend to each other and are joined, [B, P, D] to [B, P / 4, D]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, norm = config.sizes, partial(LayerNorm, sizes=config.sizes, eps=config.layer_norm_eps, dtype=dtype)
        self.attn_norm, self.norm = norm("D"), norm("M")
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.up = Einsum("BPM,MR->BPR", sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BPR,RD->BPD", sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        B, _, D = x_BPD.shape
        windows = x_BPD.reshape(-1, 4, D)
        windows = windows + self.attn(self.attn_norm(windows), jnp.zeros(windows.shape[:2], jnp.int32))
        y_BPD = self.down(gelu_tanh(self.up(self.norm(windows.reshape(B, -1, 4 * D)))))
        return y_BPD + windows.mean(axis=1).reshape(y_BPD.shape)


class MiniCpmVit(Siglip):
    """Patches of images of any size, side by side [1, X, Y, P Y], to features."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features."""
        return ("pixel_values", "target_sizes")

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        super().build(config, dtype, keys)
        self.inside = Inside(config, dtype=dtype, keys=keys)

    @property
    def rounds(self) -> int:
        """How many times four patches are joined."""
        return int(self.config.merger_times + self.config.joins_inside)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        sizes, p = np.array(grids) * 2**self.rounds, self.config.patch_size
        count = int(sizes.prod(axis=1).sum())
        return {"pixel_values": noise(rng, 1, 3, p, p * count), "target_sizes": sizes}

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size * 2**self.rounds)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches, sizes = patches_side_by_side(features, "target_sizes", self.config.patch_size)
        count, side, rounds = len(patches), self.config.side, self.rounds
        places, order, first = [], [], 0
        for h, w in sizes:
            own = nested_order(h, w, [2] * rounds)
            places.append(nearest_taps(h, w, side, side, divides=True).index_PA[own, 0])
            order.append(first + own)
            first += h * w
        size = bucket(count, multiple=4**rounds)
        images = np.repeat(np.arange(len(sizes), dtype=np.int32), [h * w for h, w in sizes])
        arrays = (
            padded(patches[np.concatenate(order)], size),
            padded(np.concatenate(places), size),
            padded(images, size, -1),
        )
        counts = [h * w // 4**rounds for h, w in sizes]
        return Prepared(arrays, np.arange(sum(counts)), counts)

    def __call__(  # type: ignore[override]
        self, patches_PC: jax.Array, places_P: jax.Array, image_P: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.patch(patches_PC[None].astype(self.patch.kernel.dtype)) + self.positions[...][places_P]
        for i, layer in enumerate(self.layers):
            x_BPD = layer(x_BPD, image_P[None])
            if self.config.joins_inside and i == self.config.insert_layer_id:
                x_BPD, image_P = self.inside(x_BPD), image_P[::4]
        return self.projector(self.norm(x_BPD)), ()


class CanvasVit(MiniCpmVit):
    """The tower of MiniCPM-V 4.7, whose images have rotary positions of the text on canvases."""

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        grids = given(features, "target_sizes", 2) // 2**self.rounds
        return replace(super().prepare(features), grids=[(1, h, w) for h, w in grids.tolist()])

    def rotary_places(self, ids_T: np.ndarray, grids: Sequence[tuple[int, int, int]]) -> tuple[np.ndarray, int]:
        markers = Markers(self.config.slice_start_id, self.config.other_markers)
        return canvas_positions(ids_T, self.config.placeholder, grids, markers)
