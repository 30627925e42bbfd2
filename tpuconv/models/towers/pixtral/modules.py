"""The tower of Pixtral. The patches of all images are one sequence; patches of one image see each other."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UsageError
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm, apply_rope, apply_rope_to_neighbours
from tpuconv.models.common.seen import Prepared
from tpuconv.models.towers.angles import alternating, cos_sin
from tpuconv.models.towers.encoder import ACTS_BY_NAME, FeatureEncoder, Grids, given, noise, padded, patches_of
from tpuconv.models.towers.image_encoder import states_of
from tpuconv.models.towers.places import block_order, bucket, raster
from tpuconv.models.towers.vit import MLP, Attention, Block


class Pixtral(FeatureEncoder):
    """Patches [P, C] of images of any size to features [P / s^2, O], if the projector joins s x s patches."""

    takes = ("pixel_values", "image_sizes")
    config: Any
    rotate = staticmethod(apply_rope)

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        norm = partial(RMSNorm, "D", config.sizes, 1e-5, dtype=dtype)
        self.patch = Einsum("BPC,CD->BPD", config.sizes, dtype=dtype, keys=keys)
        self.pre_norm = norm()
        self.layers = nnx.List(
            [
                Block(
                    config,
                    norm,
                    Attention(config, bias=False, out_bias=False, rotate=type(self).rotate, dtype=dtype, keys=keys),
                    MLP(config, ACTS_BY_NAME[config.hidden_act], gated=True, bias=False, dtype=dtype, keys=keys),
                    dtype=dtype,
                )
                for _ in range(config.num_hidden_layers)
            ]
        )

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        sizes = np.array(grids) * self.pixels_per_feature
        return {"pixel_values": noise(rng, len(grids), 3, *sizes.max(axis=0).tolist()), "image_sizes": sizes}

    @property
    def pixels_per_feature(self) -> int:
        return int(self.config.patch_size * self.config.merge)

    def prepare(self, features: Mapping[str, np.ndarray]) -> Prepared:
        pixels_ICYX, p, s = given(features, "pixel_values", 4), self.config.patch_size, self.config.merge
        whole = np.full((len(pixels_ICYX), 2), pixels_ICYX.shape[2:])
        sizes = given(features, "image_sizes", 2) if "image_sizes" in features else whole
        if len(sizes) != len(pixels_ICYX) or (sizes > whole).any():
            raise UsageError(f"image_sizes do not fit the {len(whole)} images of pixel_values, {whole[0]}")
        patches, places, grids = [], [], []
        for image_CYX, (height, width) in zip(pixels_ICYX, sizes.tolist(), strict=True):
            h, w = height // p, width // p
            order = block_order(h, w, s)
            patches.append(np.asarray(patches_of(image_CYX[None, :, :height, :width], p))[0][order])
            places.append(raster(h, w)[order])
            grids.append((1, h // s, w // s))
        numbers = np.repeat(np.arange(len(grids), dtype=np.int32), [len(each) for each in places])
        size = bucket(len(numbers), multiple=s * s)
        arrays = (
            padded(np.concatenate(patches), size),
            padded(np.concatenate(places), size),
            padded(numbers, size, -1),
        )
        counts = [h * w for _, h, w in grids]
        return Prepared(arrays, np.arange(sum(counts)), counts, grids)

    def __call__(
        self, patches_PC: jax.Array, at_P2: jax.Array, image_P: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        x_BPD = self.pre_norm(self.patch(patches_PC[None].astype(self.patch.kernel.dtype)))
        turns = cos_sin(alternating(at_P2[None], self.config.sizes["H"], self.config.rope_theta), x_BPD.dtype)
        wanted = self.config.feature_layers
        return self.projector(states_of(self.layers, x_BPD, image_P[None], turns, wanted=wanted)), ()


class ReleasedPixtral(Pixtral):
    """The same with queries and keys as Mistral releases them."""

    rotate = staticmethod(apply_rope_to_neighbours)
