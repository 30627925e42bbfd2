"""Naive-N0.5-Flash: MiMo-V2-Flash whose layers that see all tokens attend to those that an indexer selects."""

from dataclasses import replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, LARGEST_CACHED, IndexKeys, write_slots
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Keys
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v32 import modules as deepseek_v32
from tpuconv.models.mimo_v2_flash import modules as mimo
from tpuconv.models.naive_n05_flash.family import Config

LEAST_SIZE = 1e-4
"""The least size of a vector, by its largest element, that its scale depends on."""


def rounded_to_fp8(x: jax.Array) -> jax.Array:
    """Returns vectors [..., x] in float32, rounded to float8_e4m3fn with a scale for each."""
    wide, most = x.astype(jnp.float32), LARGEST_CACHED["float8_e4m3fn"]
    scale = jnp.maximum(jnp.abs(wide).max(-1, keepdims=True), LEAST_SIZE) / most
    return jnp.clip(wide / scale, -most, most).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale


class HiddenIndexer(deepseek_v32.Indexer):
    """DeepSeek V3.2's indexer. Queries are computed from hidden states. Queries and keys are rounded to FP8 where they
    are multiplied: the cache has keys in the model's dtype."""

    eps: ClassVar[float] = 1e-5

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)  # type: ignore[arg-type]
        self.rounded = rounded_to_fp8 if config.indexer_activation_dtype == "fp8_e4m3" else lambda x: x

    def queries(self, x_BTQ: jax.Array, step: Step) -> jax.Array:
        return self.rounded(super().queries(x_BTQ, step))

    def selected(self, x_BTD: jax.Array, index: IndexKeys, step: Step, visible_BTS: jax.Array) -> jax.Array:
        """Returns the mask [B, T, S] of the selected tokens among the visible ones; `index` has the keys of all."""
        return self(x_BTD, x_BTD, replace(index, i_BSx=self.rounded(index.i_BSx)), step, visible_BTS)  # type: ignore[arg-type]


class TokenSelectingAttention(mimo.Attention):
    """Attention to the tokens that an indexer selects. Also returns the indexer's keys."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.indexer = HiddenIndexer(config, dtype=dtype, keys=keys)

    def __call__(  # type: ignore[override]
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, cache: tuple[KV, IndexKeys] | None
    ) -> tuple[jax.Array, tuple[KV, IndexKeys]]:
        kv, index = cache or (None, None)
        q_BTNH, kv = self.projected(x_BTD, step, kv)
        new = IndexKeys(self.indexer.key(x_BTD, step))
        index = new if index is None else write_slots(index, new, step.slot)
        return self.attended(q_BTNH, kv, self.indexer.selected(x_BTD, index, step, step.visible(window))), (kv, index)


class Block(mimo.Block):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        kind = TokenSelectingAttention if layer in config.layer_sets["indexer_layers"] else mimo.Attention
        return kind(config, layer, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block

    def cached(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S]."""
        kv = mimo.new_kv(config, layer, shape, dtype)
        if layer not in config.layer_sets["indexer_layers"]:
            return kv
        return kv, IndexKeys.empty(config, shape, self.embed.embedding.dtype)
