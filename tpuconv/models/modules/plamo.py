"""Norms of PLaMo 3, and its layer."""

from typing import Any

import jax

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import RMSNorm, normalize


class OffsetRMSNorm(RMSNorm):
    """RMS norm whose scale is stored less `offset`. Rounds to the dtype of x, then scales."""

    offset = 1.0

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        return normalize(x, scale.ndim, self.eps).astype(x.dtype) * (self.offset + scale)


class OffsetBlock(blocks.SandwichBlock):
    """One layer: attention, then an MLP, each between two norms, with residual connections. The scales of the norms
    behind them begin at 1/5 and at 5^-1.5."""

    post_attn_norm: OffsetRMSNorm
    post_mlp_norm: OffsetRMSNorm

    def __init__(self, config: Any, layer: int, **options: Any):
        super().__init__(config, layer, **options)
        self.post_attn_norm.offset, self.post_mlp_norm.offset = 1 / 5, 5**-1.5
