"""The vision transformer of BLIP-2, and the Q-Former behind it.

Letters: B images, P patches and the class token before them, C values of a patch, D their width, which is the width S
that queries read.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal
from tpuconv.models.towers.clip.modules import clip_layers, with_class_token
from tpuconv.models.towers.encoder import given, patches_of
from tpuconv.models.towers.image_encoder import Arranged, ImageEncoder
from tpuconv.models.towers.qformer.modules import QFormer


class ImageQFormer(QFormer):
    """An image [B, P, S] to features [B, Q, O]."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.tokens = config.queries

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        pixels_BCYX = given(features, "pixel_values", 4)
        return pixels_BCYX, Arranged([self.tokens] * len(pixels_BCYX))

    def __call__(self, x_BPS: jax.Array) -> jax.Array:
        return super().__call__(x_BPS[:, None])[:, 0]


class BlipVit(ImageEncoder):
    """The vision transformer of BLIP-2: a class token before the patches, which queries read too."""

    def build(self, config: PartConfig, dtype: DTypeLike, keys: Keys) -> None:
        sizes = config.sizes
        norm = partial(LayerNorm, "D", sizes, config.layer_norm_eps, dtype=dtype)
        self.class_token = nnx.Param(normal(keys(), (sizes["D"],), dtype))
        self.patch = Einsum("BPC,CD->BPD", sizes, bias=True, dtype=dtype, keys=keys)
        self.positions = nnx.Param(normal(keys(), (sizes["P"], sizes["D"]), dtype))
        self.layers = clip_layers(config, norm, dtype, keys)
        self.norm = norm()

    def embedded(self, pixels_BCYX: jax.Array) -> jax.Array:
        x_BPD = self.patch(patches_of(pixels_BCYX.astype(self.patch.kernel.dtype), self.config.patch_size))
        return with_class_token(self.class_token[...], x_BPD) + self.positions[...]
