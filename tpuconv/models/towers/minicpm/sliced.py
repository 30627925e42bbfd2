"""The tower of MiniCPM-V 2.6, 4 and 4.5: SigLIP for slices of images, each padded to the largest, and its resampler.

Letters: Q learned queries, G their heads, E the width of a head, A the width of the resampler.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.logits import padded_rows
from tpuconv.models.towers.angles import columns_then_rows
from tpuconv.models.towers.encoder import Grids, noise, padded
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.minicpm.modules import patches_side_by_side
from tpuconv.models.towers.navit.modules import cross_attended
from tpuconv.models.towers.places import bucket, nearest_taps, raster
from tpuconv.models.towers.siglip.modules import Siglip

USUAL_SLICE = 32
"""The patches along a side of a square slice of the usual size, 448 pixels."""


def sines_of_places(at_BP2: jax.Array, width: int) -> jax.Array:
    """Returns for each patch [B, P, width], in float32: the sines and cosines of its column by width / 4 rates, then
    the ones of its row."""
    angles = columns_then_rows(at_BP2, width, 1e4)
    halves = angles.reshape(*angles.shape[:-1], 2, -1)
    return jnp.concatenate([jnp.sin(halves), jnp.cos(halves)], axis=-1).reshape(*angles.shape[:-1], width)


class SliceQueries(nnx.Module):
    """Learned queries that attend to the patches of each slice, [B, P, D] to [B, Q, O]. The rows and columns of patches
    are in their keys alone."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        product, norm = partial(Einsum, dtype=dtype, keys=keys), partial(LayerNorm, "A", sizes, 1e-6, dtype=dtype)
        self.query = nnx.Param(normal(keys(), (sizes["Q"], sizes["A"]), dtype))
        self.before = product("BPD,DA->BPA", sizes)
        self.query_norm, self.key_norm, self.norm = norm(), norm(), norm()
        self.q, self.k, self.v = (product("BPA,AGE->BPGE", sizes, bias=True) for _ in range(3))
        self.o = product("BPGE,GEA->BPA", sizes, bias=True)
        self.matrix = product("BPA,AO->BPO", sizes)

    def __call__(self, x_BPD: jax.Array, at_BP2: jax.Array, is_key_BP: jax.Array) -> jax.Array:
        value_BPA = self.key_norm(self.before(x_BPD))
        key_BPA = value_BPA + sines_of_places(at_BP2, value_BPA.shape[-1]).astype(value_BPA.dtype)
        query_QA = self.query_norm(self.query[...].astype(x_BPD.dtype))
        query_BQA = jnp.broadcast_to(query_QA, (len(x_BPD), *query_QA.shape))
        y_BQGE = cross_attended(self.q(query_BQA), self.k(key_BPA), self.v(value_BPA), is_key_BP)
        return self.matrix(self.norm(self.o(y_BQGE)))


class SlicedVit(Siglip):
    """Patches of slices of any size, side by side [1, X, Y, P Y], to features [B, Q, O] of each slice. `tgt_sizes` are
    the rows and columns of patches of each."""

    @property
    def takes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names of the features."""
        return ("pixel_values", "tgt_sizes")

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        side, p = min(USUAL_SLICE, self.config.side), self.config.patch_size
        sizes = np.array([(side, side - i % 2) for i in range(len(grids))])
        return {"pixel_values": noise(rng, 1, 3, p, p * int(sizes.prod(axis=1).sum())), "tgt_sizes": sizes}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches, sizes = patches_side_by_side(features, "tgt_sizes", self.config.patch_size)
        length, rows, side = bucket(max(h * w for h, w in sizes)), padded_rows(len(sizes)), self.config.side
        ends = np.cumsum([h * w for h, w in sizes])[:-1]
        arrays = (
            [padded(own, length) for own in np.split(patches, ends)],
            [padded(nearest_taps(h, w, side, side, divides=True).index_PA[:, 0], length) for h, w in sizes],
            [padded(raster(h, w), length) for h, w in sizes],
            [np.arange(length) < h * w for h, w in sizes],
        )
        queries = self.config.query_num
        stacked = tuple(padded(np.stack(each), rows) for each in arrays)
        return Prepared(stacked, np.arange(len(sizes) * queries), [queries] * len(sizes))

    def __call__(  # type: ignore[override]
        self, patches_BPC: jax.Array, places_BP: jax.Array, at_BP2: jax.Array, is_key_BP: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.patch(patches_BPC.astype(self.patch.kernel.dtype)) + self.positions[...][places_BP]
        segment_BP = jnp.zeros(x_BPD.shape[:2], jnp.int32)
        x_BPD = states_of(self.layers, x_BPD, segment_BP, None, is_key_BP, wanted=(), norm=self.norm)
        return self.projector(x_BPD, at_BP2, is_key_BP), ()
