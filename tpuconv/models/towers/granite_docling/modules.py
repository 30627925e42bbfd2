"""The tower of Granite for Docling and what follows it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, gelu, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.encoder import Grids, check_squares, given, noise, padded
from tpuconv.models.towers.image_encoder import joined_squares
from tpuconv.models.towers.siglip.modules import Siglip


def sines_of_columns_and_rows(side: int, width: int) -> np.ndarray:
    """Returns what is added to the patches of a square [P, O]: sines and cosines of the column, then of the row, at
    rates 10000^(-4j/O)."""
    rates = 10_000.0 ** (-np.arange(width // 4) / (width // 4))
    angles = np.arange(side)[:, None] * rates
    each = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    both = [np.broadcast_to(each[None], (side, *each.shape)), np.broadcast_to(each[:, None], (side, *each.shape))]
    return np.concatenate(both, axis=-1).reshape(side * side, width).astype(np.float32)


class DeepMerger(nnx.Module):
    """A norm and two matrices of joined patches, [B, P, M] to [B, P, O]."""

    def __init__(self, config: Any, width: str, *, dtype: DTypeLike, keys: Keys):
        self.norm = LayerNorm(width, config.sizes, 1e-5, dtype=dtype)
        self.up = Einsum(f"BP{width},{width}A->BPA", config.sizes, bias=True, dtype=dtype, keys=keys)
        self.down = Einsum("BPA,AO->BPO", config.sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_BPM: jax.Array) -> jax.Array:
        return self.down(gelu(self.up(self.norm(x_BPM))))


class JoiningPath(nnx.Module):
    """Joins s x s patches, [B, P, D] to [B, P / s^2, O], and those behind some layers."""

    def __init__(self, config: Any, width: str, merge: int, *, dtype: DTypeLike, keys: Keys):
        self.side, self.merge, self.out = config.side, merge, config.sizes["O"]
        self.matrix = Einsum(f"BP{width},{width}O->BPO", config.sizes, dtype=dtype, keys=keys)
        self.deep = nnx.List([DeepMerger(config, width, dtype=dtype, keys=keys) for _ in range(config.sizes["I"])])

    def __call__(self, x_BPD: jax.Array, deep: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        join = partial(joined_squares, h=self.side, w=self.side, s=self.merge)
        x_BPO = self.matrix(join(x_BPD))
        x_BPO = x_BPO + sines_of_columns_and_rows(self.side // self.merge, self.out).astype(x_BPO.dtype)
        return x_BPO, [each(join(y_BPD)) for each, y_BPD in zip(self.deep, deep, strict=True)]


class ToScalar(nnx.Module):
    """The weights of a product with one output."""

    def __init__(self, width: int, *, dtype: DTypeLike, keys: Keys):
        self.kernel, self.bias = nnx.Param(normal(keys(), (width,), dtype)), nnx.Param(jnp.zeros((1,), dtype))


class DensityRouter(nnx.Module):
    """The router that says, before the model runs, how patches are joined. It is kept, and nothing reads it."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.att, self.down = (ToScalar(sizes[letter], dtype=dtype, keys=keys) for letter in "DG")
        self.norm = LayerNorm("D", sizes, 1e-5, dtype=dtype)
        self.up = Einsum("BPD,DG->BPG", sizes, bias=True, dtype=dtype, keys=keys)


class Connector(nnx.Module):
    """Joins patches coarsely, or finely, and brings them to the width of the text; with features for its first
    layers."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes, s = config.sizes, config.scale_factor
        norm = partial(LayerNorm, sizes=sizes, eps=1e-5, dtype=dtype)
        self.norm_in, self.norm_mid, self.norm_out = norm("D"), norm("O"), norm("O")
        self.coarse = JoiningPath(config, "M", s, dtype=dtype, keys=keys)
        self.fine = JoiningPath(config, "R", s // 2, dtype=dtype, keys=keys) if config.use_fine_route else None
        self.matrix = Einsum("BPA,AO->BPO", sizes, dtype=dtype, keys=keys)
        self.router = DensityRouter(config, dtype=dtype, keys=keys) if config.has_router else None

    def __call__(
        self, x_BPD: jax.Array, deep: list[jax.Array], *, is_fine: bool
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        path = self.fine if is_fine and self.fine is not None else self.coarse
        x_BPO, added = path(self.norm_in(x_BPD), deep)
        return self.norm_out(self.matrix(gelu(self.norm_mid(x_BPO)))), tuple(added)


class DoclingVit(Siglip):
    """Tiles [B, T, X, Y, X] of images, some of them padding, to features."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features. With `tile_fine_mask` patches are joined finely."""
        return ("pixel_values", "pixel_attention_mask", "tile_fine_mask")

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        tiles, side = len(grids), self.config.image_size
        features = {
            "pixel_values": noise(rng, 1, tiles, 3, side, side),
            "pixel_attention_mask": np.ones((1, tiles), bool),
        }
        return features | ({"tile_fine_mask": np.ones((1, tiles), bool)} if self.config.use_fine_route else {})

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        config, is_tile = self.config, given(features, "pixel_attention_mask", 2).astype(bool)
        tiles = given(features, "pixel_values", 5)[is_tile]
        check_squares(tiles, config.image_size, "tiles")
        is_fine = "tile_fine_mask" in features
        if is_fine and not config.use_fine_route:
            raise UsageError("this model joins patches coarsely alone", hint="leave out tile_fine_mask")
        tokens = (config.side // (config.scale_factor // (2 if is_fine else 1))) ** 2
        # the shape of the second array says how patches are joined, since programs are compiled by shapes
        arrays = (padded(tiles, padded_rows(len(tiles))), np.zeros(int(is_fine), np.int32))
        return Prepared(arrays, np.arange(len(tiles) * tokens), [tokens] * len(tiles))

    def __call__(  # type: ignore[override]
        self, pixels_BCYX: jax.Array, fine: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD, deep = self.embedded(pixels_BCYX), []
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        for i, layer in enumerate(self.layers):
            x_BPD = layer(x_BPD, segment_BP)
            if i in self.config.deepstack_visual_indexes:
                deep.append(x_BPD)
        return self.projector(self.norm(x_BPD), deep, is_fine=bool(fine.shape[0]))  # type: ignore[no-any-return]
