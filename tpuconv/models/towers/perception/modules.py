"""The Perception Encoder (arXiv:2504.13181) and the projector of Perception LM."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.towers.angles import columns_then_rows, cos_sin, from_one
from tpuconv.models.towers.clip.modules import with_class_token
from tpuconv.models.towers.encoder import ACTS_BY_NAME, Grids, given, patches_of
from tpuconv.models.towers.image_encoder import Arranged, ImageEncoder
from tpuconv.models.towers.llava.modules import LlavaMatrices
from tpuconv.models.towers.places import raster
from tpuconv.models.towers.vit import turning_layers

THETA = 1e4


class PerceptionEncoder(ImageEncoder):
    """Images [B, X, Y, X] of one size. Heads turn by the columns and rows of patches: counted from 1 beside a class
    token, which does not turn, else from 0."""

    def build(self, config: Any, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        norm = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        token = normal(keys(), (sizes["D"],), dtype)
        self.class_token = nnx.Param(token) if config.has_class_token else None
        self.patch = Einsum("BPC,CD->BPD", sizes, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.pre_norm = norm()
        act = ACTS_BY_NAME[config.hidden_act]
        self.layers = turning_layers(config, norm, act, scaled=config.has_scales, dtype=dtype, keys=keys)
        self.norm = norm() if config.use_post_transformer_norm else None

    def embedded(self, pixels_BCYX: jax.Array) -> jax.Array:
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), self.config.patch_size))
        if self.class_token is not None:
            x_BPD = with_class_token(self.class_token[...], x_BPD)
        return self.pre_norm(x_BPD + self.positions[...])

    def random_images(self, rng: np.random.Generator, grids: Grids) -> dict[str, np.ndarray]:
        images = super().random_images(rng, grids)
        assert images is not None
        return {name: image_BCYX[:, None] for name, image_BCYX in images.items()}  # one tile each

    def angles(self) -> tuple[jax.Array, jax.Array]:
        at_P2, head_dim = np.asarray(raster(self.config.side, self.config.side)), self.config.sizes["H"]
        if self.class_token is None:
            return cos_sin(columns_then_rows(at_P2[None], head_dim, THETA))
        at_P2 = np.concatenate([[[-1, -1]], at_P2])
        return cos_sin(from_one(at_P2[None], head_dim, THETA))


class Means(LlavaMatrices):
    """Two matrices of each patch [B, P, M], and the means of squares of patches [B, P / s^2, O]."""

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """As of `LlavaMatrices`, of images [B, X, Y, X] or of as many tiles of each [B, tiles, X, Y, X]."""
        pixels, config = given(features, "pixel_values", 4, 5), self.config
        tiles = pixels.shape[1] if pixels.ndim == 5 else 1
        tokens = tiles * (config.side // config.merge) ** 2
        return pixels.reshape(-1, *pixels.shape[-3:]), Arranged([tokens] * len(pixels))

    def __call__(self, x_BPM: jax.Array) -> jax.Array:
        x_BPO, s = super().__call__(x_BPM), self.config.merge
        h = self.config.side // s
        x_BhshsO = x_BPO.reshape(len(x_BPO), h, s, h, s, -1)
        return jnp.mean(x_BhshsO, axis=(2, 4)).reshape(len(x_BPO), h * h, -1)
