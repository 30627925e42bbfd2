"""Matrices with limits, and the projector of Gemma 4."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.beside import PartConfig
from tpuconv.models.common.layers import Einsum, Keys, normalize
from tpuconv.models.towers.gemma4.family import LIMITS


class LimitedEinsum(Einsum):
    """An einsum whose input and output are limited to ranges that are parameters, if `use_clipped_linears`."""

    def __init__(self, equation: str, config: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(equation, config.sizes, dtype=dtype, keys=keys)
        self.is_limited = config.use_clipped_linears
        for name in LIMITS if self.is_limited else ():
            setattr(self, name, nnx.Param(jnp.asarray(jnp.inf if name.endswith("max") else -jnp.inf, jnp.float32)))

    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.is_limited:
            return super().__call__(x)
        low, high, out_low, out_high = (getattr(self, name)[...] for name in LIMITS)
        return clipped(super().__call__(clipped(x, low, high)), out_low, out_high)


def clipped(x: jax.Array, low: jax.Array, high: jax.Array) -> jax.Array:
    """Returns x between two limits, in the dtype of x."""
    return jnp.clip(x, low.astype(x.dtype), high.astype(x.dtype))


class NormedMatrix(nnx.Module):
    """An RMS norm without a scale, with the eps of the tower, and a matrix: [..., W] to [..., O]."""

    def __init__(self, config: PartConfig, *, dtype: DTypeLike, keys: Keys):
        self.eps = config.rms_norm_eps
        self.matrix = Einsum("BPW,WO->BPO", config.sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BPW: jax.Array) -> jax.Array:
        return self.matrix(normalize(x_BPW, 1, self.eps).astype(x_BPW.dtype))
