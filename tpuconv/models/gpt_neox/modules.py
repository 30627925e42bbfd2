"""GPT-NeoX (arXiv:2204.06745)."""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder, Step
from tpuconv.models.common.layers import Keys, LayerNorm, gelu
from tpuconv.models.gpt_neox.family import Config


class Attention(blocks.Attention):
    """Attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=config.attention_bias, out_bias=config.attention_bias, dtype=dtype, keys=keys)


class MLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, bias=True, dtype=dtype, keys=keys)

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu(x_BTF)


class Block(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm of its own, one after the other or side by side."""

    attention_type: ClassVar[Callable[..., Any]] = Attention
    mlp_type: ClassVar[Callable[..., Any]] = MLP
    norm_type = LayerNorm

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.parallel = config.use_parallel_residual

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        if not self.parallel:
            return super().__call__(x_BTD, step, window, kv)
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        return self.mlp(self.mlp_norm(x_BTD)) + y_BTD + x_BTD, kv


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    norm_type = LayerNorm
