"""Attention of Domyn Edge, whose layers differ in the size of heads."""

from typing import Any

from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys, PlainRMSNorm


class KeyScaledAttention(blocks.NormedAttention):
    """Grouped-query attention, x [B, T, D] to [B, T, D], with norms of queries and keys, of which the norm of keys has
    a scale. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Any, *, dtype: DTypeLike, keys: Keys, **options: Any):
        super().__init__(config, dtype=dtype, keys=keys, **options)
        self.q_norm = PlainRMSNorm("H", config.sizes, config.rms_norm_eps, dtype=dtype)


class OwnSizesBlock(blocks.SandwichBlock):
    """One layer: attention with heads of a size of its own, then an MLP, each between two norms, with residual
    connections."""

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        return self.attention_type(config.of_layer(layer), dtype=dtype, keys=keys)


class OwnHeadSizes(Decoder):
    """A decoder whose layers differ in the size of heads."""

    def cached(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> KV:
        return KV.empty(config.of_layer(layer), layer, shape, dtype)
