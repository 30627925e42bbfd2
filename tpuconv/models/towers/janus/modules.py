"""The aligner of Janus."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.towers.encoder import ACTS_BY_NAME, given
from tpuconv.models.towers.image_encoder import Arranged


class Aligner(nnx.Module):
    """Matrices of each patch with the tower's activation between, [B, P, D] to [B, P, O]."""

    takes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys):
        product = partial(Einsum, sizes=config.sizes, bias=True, dtype=dtype, keys=keys)
        self.positions, self.act = config.positions, ACTS_BY_NAME[config.hidden_act]
        self.up = product("BPD,DO->BPO")
        self.hidden = nnx.List([product("BPO,OA->BPA") for _ in range(config.sizes["I"])])

    def arranged(self, features: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Arranged]:
        """Returns the images as the tower takes them, and how their features follow each other."""
        pixels_BCYX = given(features, "pixel_values", 4)
        return pixels_BCYX, Arranged([self.positions] * len(pixels_BCYX))

    def __call__(self, x_BPD: jax.Array) -> jax.Array:
        x_BPO = self.up(x_BPD)
        for matrix in self.hidden:
            x_BPO = matrix(self.act(x_BPO))
        return x_BPO
