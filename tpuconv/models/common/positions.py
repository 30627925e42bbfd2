"""Learned positions, which are added to the embeddings of tokens."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.gpt import PositionedConfig
from tpuconv.models.common.layers import Keys, normal


class Positions(nnx.Module):
    """A vector for each position."""

    def __init__(self, config: PositionedConfig, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.first = config.first_position
        self.embedding = nnx.Param(normal(keys(), (sizes["positions"], sizes["D"]), dtype))

    def __call__(self, pos_BT: jax.Array) -> jax.Array:
        """Returns the vectors [B, T, D] of positions. One beyond the last gives NaN; padding gives some vector."""
        return jnp.take(self.embedding[...], jnp.maximum(pos_BT, 0) + self.first, axis=0, mode="fill")


class PositionedDecoder(Decoder):
    """A decoder with learned positions; see `Decoder`."""

    def __init__(
        self,
        config: PositionedConfig,
        *,
        scan_layers: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        rngs = rngs or nnx.Rngs(0)
        super().__init__(config, scan_layers=scan_layers, dtype=dtype, rngs=rngs)
        self.positions = Positions(config, dtype=dtype, keys=Keys(rngs.params()))

    @property
    def input_modules(self) -> tuple[str, ...]:
        return ("positions",)

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        return x_BTD + self.positions(pos_BT).astype(x_BTD.dtype)
