"""Modules of older families."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import blocks
from tpuconv.models.common.alibi import alibi
from tpuconv.models.common.cache import KV
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.gpt import PositionedConfig
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, normal, sinusoids, times
from tpuconv.models.common.logit_bias import BiasedLogits
from tpuconv.models.common.steps import Step


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


class SummedBlock(blocks.PreNormBlock):
    """One layer: attention and MLP, each after a norm of its own, one after the other or side by side."""

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.parallel = config.use_parallel_residual

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        if not self.parallel:
            return super().__call__(x_BTD, step, window, kv)
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        return self.mlp(self.mlp_norm(x_BTD)) + y_BTD + x_BTD, kv


class SumNormBlock(blocks.PreNormBlock):
    """One layer: attention, then an MLP. A norm follows each residual connection (arXiv:1706.03762)."""

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        y_BTD, kv = self.attn(x_BTD, step, window, kv)
        x_BTD = self.attn_norm(x_BTD + y_BTD)
        return self.mlp_norm(x_BTD + self.mlp(x_BTD)), kv


class LastBiasBlock(blocks.PreNormBlock):
    """One layer: attention, then an MLP, each after a norm. The attention of the last layer has a bias of its
    output."""

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        attn = super().new_attention(config, layer, dtype=dtype, keys=keys)
        if layer in config.layer_sets["biased_layers"]:
            attn.o = Einsum("BTNH,NHD->BTD", config.sizes, bias=True, dtype=dtype, keys=keys)
        return attn


class ScaledScoresBlock(blocks.PreNormBlock):
    """One layer: attention, then an MLP, each after a norm. Each layer has a factor of scores of its own."""

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        attn = super().new_attention(config, layer, dtype=dtype, keys=keys)
        attn.scale = config.score_scales[layer]
        return attn


class AlibiAttention(blocks.Attention):
    """Attention biased by distance, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.heads = config.num_attention_heads

    def score_bias(self, step: Step) -> jax.Array:
        return alibi(step.pos_BS, self.heads)


class ClippedAlibiAttention(AlibiAttention, blocks.ClippedAttention):
    """The same with queries, keys and values that are clipped, if the config has a limit."""


class ChosenMLP(blocks.PlainMLP):
    """MLP without a gate, x [B, T, D] to [B, T, D], with ReLU or GELU as `activation_function` says."""

    def __init__(self, config: Any, F: str, **options: Any):
        super().__init__(config, F, **options)
        self.activation = config.activation_function

    def act(self, x_BTF: jax.Array) -> jax.Array:
        return nnx.relu(x_BTF) if self.activation == "relu" else nnx.gelu(x_BTF, approximate=False)


class NormedEmbeddings(Decoder):
    """A decoder with a norm of the embeddings."""

    embed_norm_type: ClassVar[Any] = LayerNorm

    def __init__(
        self,
        config: Any,
        *,
        scan_layers: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        super().__init__(config, scan_layers=scan_layers, dtype=dtype, rngs=rngs)
        self.embed_norm = self.embed_norm_type("D", config.sizes, config.rms_norm_eps, dtype=dtype)

    @property
    def input_modules(self) -> tuple[str, ...]:
        return ("embed_norm",)

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        normed_BTD: jax.Array = self.embed_norm(x_BTD)
        return normed_BTD


FIRST_POSITION = 2
"""The position of the first token."""


class ScaledDecoder(Decoder):
    """A decoder whose embeddings have the root of their width as a factor, if `scale_embedding` is set."""

    config: Any

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        return times(x_BTD, self.config.hidden_size**0.5) if self.config.scale_embedding else x_BTD


class SinusoidDecoder(ScaledDecoder):
    """Such a decoder with sines of the positions."""

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        return x_BTD + sinusoids(pos_BT + FIRST_POSITION, x_BTD.shape[-1]).astype(x_BTD.dtype)


class OpenSinusoidDecoder(BiasedLogits, ScaledDecoder):
    """Such a decoder with sines of the positions from 0 on, with the rates of the paper, and with a bias of each
    logit."""

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        return x_BTD + sinusoids(pos_BT, x_BTD.shape[-1], open_ended=True).astype(x_BTD.dtype)


class ScaledPositionedDecoder(ScaledDecoder, PositionedDecoder):
    """Such a decoder with learned positions."""


class NoNorm(nnx.Module):
    """Stands where other models have their last norm."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD


class UnnormedPositionedDecoder(PositionedDecoder):
    """A decoder with learned positions and without a last norm."""

    def __init__(self, config: Any, **options: Any):
        super().__init__(config, **options)
        self.norm = NoNorm()
