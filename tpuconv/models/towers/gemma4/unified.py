"""The variant of Gemma 4 without encoders: patches and frames of samples are projected as they are."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.encoder import FeatureEncoder
from tpuconv.models.towers.gemma4.audio import frames_of, random_frames
from tpuconv.models.towers.gemma4.vision import PlacedPatches


class Patches(PlacedPatches):
    """Patches [B, P, C] to features [B, P, O], by a matrix and learned positions of rows and columns."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        self.patch_norm = LayerNorm("C", sizes, 1e-5, dtype=dtype)
        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.norm, self.position_norm = (LayerNorm("D", sizes, 1e-5, dtype=dtype) for _ in range(2))
        self.positions = nnx.Param(normal(keys(), (sizes["P"], 2, sizes["D"]), dtype))

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        patches_BPC, at_BP2 = self.places(features)
        is_patch_BP = (at_BP2 >= 0).all(axis=-1)
        counts = is_patch_BP.sum(axis=1).tolist()
        return Prepared((patches_BPC, np.maximum(at_BP2, 0)), np.flatnonzero(is_patch_BP), [n for n in counts if n])

    def __call__(self, patches_BPC: jax.Array, at_BP2: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        rows_PD, columns_PD = self.positions[...][:, 1], self.positions[...][:, 0]
        x_BPD = self.norm(self.patch(self.patch_norm(patches_BPC.astype(rows_PD.dtype))))
        x_BPD = x_BPD + (columns_PD[at_BP2[..., 1]] + rows_PD[at_BP2[..., 0]])
        return self.projector(self.position_norm(x_BPD)), ()


class Frames(FeatureEncoder):
    """Frames [B, T, W] of samples to features [B, T, O]."""

    takes = ("input_features", "input_features_mask")

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        self.dtype = dtype

    def example(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return random_frames(rng, 9, self.config.sizes["W"])

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        frames_BTW, is_sound_BT, counts = frames_of(features, 1)
        return Prepared((frames_BTW,), np.flatnonzero(is_sound_BT), counts)

    def __call__(self, frames_BTW: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return self.projector(jnp.asarray(frames_BTW, self.dtype)), ()
