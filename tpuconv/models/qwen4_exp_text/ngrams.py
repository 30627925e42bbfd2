"""Embeddings of n-grams: each token gets the embeddings of the n-grams that end with it, which hashes number."""

from dataclasses import dataclass
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.hashed_ngrams import ngram_numbers
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Embed, Keys, normal, normalize
from tpuconv.models.common.recurrence import LayerState, PackedTokens
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import by_stream
from tpuconv.models.qwen4_exp_text.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"e": "streams", "c": "ngram_width", "h": "ngram_taps"}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class NGramState(LayerState):
    """The state of a layer for n-grams: the last tokens, and the last inputs of the convolution in float32."""

    axes: ClassVar[tuple[str, ...]] = ("B ngram_tokens", "B ngram_tokens streams D")

    ids_BP: jax.Array
    x_BPeD: jax.Array

    @classmethod
    def empty(cls, config: Config, *batch: int) -> Self:
        """Returns the state before the first token."""
        sizes, inputs = config.sizes, config.ngram_size * (config.ple_conv_kernel_size - 1)
        ids_BP = jnp.full((*batch, config.ngram_size - 1), config.end_token, jnp.int32)
        return cls(ids_BP, jnp.zeros((*batch, inputs, sizes["streams"], sizes["D"]), jnp.float32))


class StreamNorm(CenteredRMSNorm):
    """RMS norm of each residual stream, x [B, T, e, D], with a scale of its own that is stored less 1."""

    def __init__(self, config: Config, *, dtype: DTypeLike):
        super().__init__("eD", with_letters(config.sizes, LEGEND), config.rms_norm_eps, dtype=dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = 1 + self.scale[...].astype(jnp.float32)
        return (normalize(x, 1, self.eps) * scale).astype(x.dtype)


class DilatedConvolution(nnx.Module):
    """A causal convolution of each channel along the tokens. Its taps are `step` tokens apart; the last one belongs to
    the current token."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.kernel = nnx.Param(normal(keys(), tuple(sizes[letter] for letter in "eDh"), dtype))
        self.step = config.ngram_size

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the output for the last tokens [B, T, e, D] of the inputs, which have as many before as the taps
        reach over. Sums are in float32."""
        kernel = self.kernel[...].astype(jnp.float32)
        taps = kernel.shape[-1]
        tokens = inputs.shape[1] - self.step * (taps - 1)
        starts = range(0, self.step * taps, self.step)
        return jnp.asarray(sum(inputs[:, at : at + tokens] * kernel[..., i] for i, at in enumerate(starts)))


class NGrams(nnx.Module):
    """The values that embeddings of n-grams add to the residual streams, x [B, T, (e D)] to [B, T, (e D)]: a
    value, which each stream weights by its product with a key, and a convolution of the weighted values. Also returns
    the state after these tokens."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.config, self.numbering = config, config.ngram_hash(layer)
        self.table = Embed({"V": self.numbering.rows, "D": sizes["ngram_dim"]}, dtype=dtype, keys=keys)
        self.key = Einsum("BTc,ceD->BTeD", sizes, dtype=dtype, keys=keys)
        self.value = Einsum("BTc,cD->BTD", sizes, dtype=dtype, keys=keys)
        self.key_norm = StreamNorm(config, dtype=dtype)
        self.query_norm = StreamNorm(config, dtype=dtype)
        self.conv_norm = StreamNorm(config, dtype=dtype)
        self.conv = DilatedConvolution(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, state: NGramState | None) -> tuple[jax.Array, NGramState]:
        config = self.config
        state = NGramState.empty(config, len(x_BTD)) if state is None else state
        packed, new_BT1 = PackedTokens.of(x_BTD, step), PackedTokens.of(step.input[..., None], step).x_BTD
        ids_BS = jnp.concatenate([state.ids_BP, new_BT1[..., 0].astype(jnp.int32)], axis=1)
        x_BTC = self.table(ngram_numbers(ids_BS, self.numbering, config.end_token)).reshape(*x_BTD.shape[:2], -1)
        query_BTeD = self.query_norm(by_stream(packed.x_BTD, config.hc_count)).astype(jnp.float32)
        product_BTe1 = (self.key_norm(self.key(x_BTC)) * query_BTeD).sum(axis=-1, keepdims=True)
        product_BTe1 *= config.hidden_size**-0.5
        root_BTe1 = jnp.sign(product_BTe1) * jnp.sqrt(jnp.maximum(jnp.abs(product_BTe1), 1e-6))
        value_BTeD = nnx.sigmoid(root_BTe1).astype(x_BTD.dtype) * self.value(x_BTC)[:, :, None]
        inputs = jnp.concatenate([state.x_BPeD, self.conv_norm(value_BTeD).astype(jnp.float32)], axis=1)
        y_BTeD = value_BTeD + nnx.silu(self.conv(inputs).astype(x_BTD.dtype))
        state = NGramState(_last(ids_BS, state.ids_BP, packed), _last(inputs, state.x_BPeD, packed))
        return packed.unpacked(y_BTeD.reshape(x_BTD.shape)), state


def _last(x: jax.Array, before: jax.Array, packed: PackedTokens) -> jax.Array:
    """As many of the last tokens of x [B, P + T, ...], which begins with those `before`, as these were."""
    at_BP = packed.length_B[:, None] + jnp.arange(before.shape[1])
    return jnp.take_along_axis(x, at_BP.reshape(*at_BP.shape, *[1] * (x.ndim - 2)), axis=1)
