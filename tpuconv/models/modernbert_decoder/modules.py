"""The decoder of ModernBERT: normalized embeddings, and a layer between the last norm and the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, gelu
from tpuconv.models.common.logit_bias import BiasedLogits
from tpuconv.models.common.steps import Step
from tpuconv.models.modernbert_decoder.family import Config


def new_layer_norm(config: Config, dtype: DTypeLike) -> LayerNorm:
    """Returns a norm, which has a bias if the config says so."""
    return LayerNorm("D", config.sizes, config.rms_norm_eps, bias=config.norm_bias, dtype=dtype)


class Attention(blocks.Attention):
    """Attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    float32_rope = True


class MLP(blocks.GatedMLP):
    """Gated MLP, x [B, T, D] to [B, T, D]."""

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return gelu(x_BTF)


class Block(nnx.Module):
    """One layer: attention, then an MLP, each after a norm, with residual connections. The first has no norm before
    attention: its input is normalized."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        bias = config.attention_bias
        self.attn_norm = new_layer_norm(config, dtype) if layer else None
        self.attn = Attention(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)
        self.mlp_norm = new_layer_norm(config, dtype)
        self.mlp = MLP(config, bias=config.mlp_bias, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        normed_BTD = x_BTD if self.attn_norm is None else self.attn_norm(x_BTD)
        y_BTD, kv = self.attn(normed_BTD, step, window, kv)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), kv


class HeadedNorm(LayerNorm):
    """The last norm, x [B, T, D] to [B, T, D]; in a model with logits a dense layer and another norm follow."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__("D", config.sizes, config.rms_norm_eps, bias=config.norm_bias, dtype=dtype)
        self.has_logits = config.has_logits
        if config.has_logits:
            self.dense = Einsum("BTA,AD->BTD", config.sizes, bias=config.classifier_bias, dtype=dtype, keys=keys)
            self.head_norm = new_layer_norm(config, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = super().__call__(x)
        return self.head_norm(gelu(self.dense(y))) if self.has_logits else y


class Model(BiasedLogits):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    config: Config

    def __init__(
        self,
        config: Config,
        *,
        scan_layers: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(config, scan_layers=scan_layers, dtype=dtype, rngs=rngs)
        self.embed_norm = new_layer_norm(config, dtype)
        self.norm = HeadedNorm(config, dtype=dtype, keys=Keys((rngs or nnx.Rngs(0)).params()))

    @property
    def input_modules(self) -> tuple[str, ...]:
        return ("embed_norm",)

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return self.embed_norm(x_BTD)
