"""The modules of projectors."""

from collections.abc import Mapping
from typing import ClassVar

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys
from tpuconv.models.towers.encoder import given
from tpuconv.models.towers.image_encoder import Arranged


class Pooled(nnx.Module):
    """The mean over k x k neighbouring patches, an RMS norm with the eps of the tower, and a matrix: [B, P, D] to [B,
    tokens, O]."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.tokens = config.mm_tokens_per_image
        self.side, self.out_side = config.side, int(self.tokens**0.5)
        self.norm = CenteredRMSNorm("D", config.sizes, config.layer_norm_eps, dtype=dtype)
        self.matrix = Einsum("BPD,DO->BPO", config.sizes, dtype=dtype, keys=keys)

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        pixels_BCYX = given(features, "pixel_values", 4)
        return pixels_BCYX, Arranged([self.tokens] * len(pixels_BCYX))

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        B, _, D = x_BPD.shape
        k = self.side // self.out_side
        x_BPD = x_BPD.reshape(B, self.out_side, k, self.out_side, k, D).mean((2, 4)).reshape(B, -1, D)
        return self.matrix(self.norm(x_BPD))
