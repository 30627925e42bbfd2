"""The matrix of patches of Fuyu, which has no encoder. P counts patches."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.encoder import FeatureEncoder, Grids, given, noise, padded
from tpuconv.models.towers.places import bucket


class PatchMatrix(nnx.Module):
    """Patches [P, C] to features [P, O]."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        self.patch = Einsum("PC,CO->PO", config.sizes, bias=True, dtype=dtype, keys=keys)

    def __call__(self, x_PC: jax.Array) -> jax.Array:
        return self.patch(x_PC.astype(self.patch.kernel.dtype))


class FuyuPatches(FeatureEncoder):
    """Patches [B, P, C] of images that have as many to features [B P, O]."""

    config: Any

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        """There are no layers."""

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size)

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        """All images have the patches of the first."""
        h, w = grids[0]
        return {"pixel_values": noise(rng, len(grids), h * w, self.config.sizes["C"])}

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches_BPC = given(features, "pixel_values", 3)
        B, P, C = patches_BPC.shape
        if (expected := self.config.sizes["C"]) != C:
            raise UsageError(f"pixel_values has patches of {C} values, the model of {expected}")
        return Prepared((padded(patches_BPC.reshape(-1, C), bucket(B * P)),), np.arange(B * P), [P] * B)

    def __call__(self, patches_PC: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return self.projector(patches_PC), ()
