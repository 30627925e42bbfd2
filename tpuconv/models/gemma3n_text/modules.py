"""Gemma 3n, the text model: attention as Gemma 4's, several residual streams of which each layer computes one, low-rank
residuals and sparse MLPs."""

from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import TanhMLP
from tpuconv.models.common.cache import KV
from tpuconv.models.common.layers import Einsum, Keys, ScaledRMSNorm, gelu_tanh
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import by_stream
from tpuconv.models.gemma3n_text.family import Config
from tpuconv.models.gemma4_text import modules as gemma4_text
from tpuconv.notation.letters import with_letters

LEGEND = {
    "p": "layer_dim",
    "d": "laurel_rank",
    "e": "side_streams",
    "r": "streams",
    "w": "streams_out",
    "k": "stream_weights",
}
"""The words of this module, by the letters of its einsums and arrays."""


class MLP(TanhMLP):
    """Gated MLP (arXiv:2002.05202) with GELU, x [B, T, D] to [B, T, D]. In sparse layers about as many gates as the
    config says are 0: statistical top-k (arXiv:2506.06644, section 3), which takes them for normally distributed."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        width = "wide_mlp" if layer in config.layer_sets["wide_layers"] else "F"
        super().__init__(config, width, dtype=dtype, keys=keys)
        sparsity = config.sparsities[layer]
        self.deviations = NormalDist().inv_cdf(sparsity) if sparsity else None

    def act(self, x_BTF: jax.Array) -> jax.Array:
        if self.deviations is None:
            return super().act(x_BTF)
        gate_BTF = x_BTF.astype(jnp.float32)
        mean_BT1, deviation_BT1 = gate_BTF.mean(-1, keepdims=True), gate_BTF.std(-1, keepdims=True)
        cutoff_BT1 = mean_BT1 + self.deviations * deviation_BT1
        return super().act(nnx.relu(gate_BTF - cutoff_BT1).astype(x_BTF.dtype))


class Laurel(nnx.Module):
    """Low-rank residual (LAuReL, arXiv:2411.07501), x [B, T, D] to [B, T, D]."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.left = Einsum("BTD,Dd->BTd", sizes, dtype=dtype, keys=keys)
        self.right = Einsum("BTd,dD->BTD", sizes, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return x_BTD + self.norm(self.right(self.left(x_BTD)))


class AltUp(nnx.Module):
    """Alternating updates (arXiv:2301.13310): the streams after a layer are predicted before it, and corrected by the
    output of the layer for the active one."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, self.active = with_letters(config.sizes, LEGEND), config.altup_active_idx
        self.router_norm = ScaledRMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)
        self.router = Einsum("BTD,Dk->BTk", sizes, dtype=dtype, keys=keys)
        self.prediction = Einsum("BTk,kwr->BTwr", sizes, dtype=dtype, keys=keys)
        self.correction = Einsum("BTk,kw->BTw", sizes, dtype=dtype, keys=keys)
        self.output_scale = nnx.Param(jnp.ones(sizes["D"], dtype))

    def _weights(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the weights [B, T, k] of the matrices."""
        weights_BTk: jax.Array = self.router(self.router_norm(x_BTD) * x_BTD.shape[-1] ** -1.0)
        return jnp.tanh(weights_BTk.astype(jnp.float32)).astype(x_BTD.dtype)

    def predicted(self, x_BTrD: jax.Array) -> jax.Array:
        """Returns the streams [B, T, r, D] without the layer: each with a weighted sum of all."""
        mix_BTwr = self.prediction(self._weights(x_BTrD[:, :, self.active]))
        return x_BTrD + jnp.einsum("BTwr,BTrD->BTwD", mix_BTwr, x_BTrD)

    def corrected(self, x_BTrD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """Returns the streams [B, T, r, D] that were predicted, each with its part of what the layer's output `y_BTD`
        for the active one has besides."""
        parts_BTw = 1 + self.correction(self._weights(y_BTD))
        innovation_BTD = y_BTD - x_BTrD[:, :, self.active]
        return x_BTrD + innovation_BTD[:, :, None] * parts_BTw[..., None]


class Block(nnx.Module):
    """One layer: attention beside a low-rank residual, then an MLP, each between two norms, for the active stream; and
    the layer's own embeddings, for all streams but the first."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        def norm() -> ScaledRMSNorm:
            return ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)

        self.count, self.has_scale = config.altup_num_inputs, config.altup_correct_scale
        self.altup = AltUp(config, dtype=dtype, keys=keys)
        self.laurel = Laurel(config, dtype=dtype, keys=keys)
        self.attn_norm, self.post_attn_norm = norm(), norm()
        self.attn = gemma4_text.Attention(config, layer, dtype=dtype, keys=keys)
        self.mlp_norm, self.post_mlp_norm = norm(), norm()
        self.mlp = MLP(config, layer, dtype=dtype, keys=keys)
        sizes = with_letters(config.sizes, LEGEND)
        self.per_layer_gate = Einsum("BTD,Dp->BTp", sizes, dtype=dtype, keys=keys)
        self.per_layer_projection = Einsum("BTp,pD->BTD", sizes, dtype=dtype, keys=keys)
        self.post_per_layer_norm = norm()

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        x_BTrD = self.altup.predicted(by_stream(x_BTD, self.count))
        active_BTD = x_BTrD[:, :, self.altup.active]
        normed_BTD = self.attn_norm(active_BTD)
        y_BTD, kv = self.attn(normed_BTD, step, window, kv)
        y_BTD = (active_BTD + self.post_attn_norm(y_BTD) + self.laurel(normed_BTD)) * 2**-0.5
        y_BTD = y_BTD + self.post_mlp_norm(self.mlp(self.mlp_norm(y_BTD)))
        x_BTrD = self.altup.corrected(x_BTrD, y_BTD)
        y_BTD = x_BTrD[:, :, self.altup.active]
        y_BTD = y_BTD * self.altup.output_scale[...] if self.has_scale else y_BTD
        y_BTD = self.per_layer_projection(gelu_tanh(self.per_layer_gate(y_BTD)) * step.input)
        x_BTrD = x_BTrD.at[:, :, 1:].add(self.post_per_layer_norm(y_BTD)[:, :, None])
        return x_BTrD.reshape(x_BTD.shape), kv


def as_large(x_BTeD: jax.Array, first_BT1D: jax.Array) -> jax.Array:
    """Returns vectors [B, T, e, D] with the root mean square of another one, in its dtype."""
    x, first = x_BTeD.astype(jnp.float32), first_BT1D.astype(jnp.float32)
    wanted_BT11 = jnp.sqrt(jnp.square(first).mean(-1, keepdims=True))
    own_BTe1 = jnp.sqrt(jnp.maximum(jnp.square(x).mean(-1, keepdims=True), 1e-5))
    return (x * (wanted_BT11 / own_BTe1)).astype(first_BT1D.dtype)


class MeanNorm(ScaledRMSNorm):
    """The last norm: of the mean of the streams, x [B, T, (r D)] to [B, T, D]. All but the first are projected, and
    made as large as the first."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.count = config.altup_num_inputs
        self.streams = Einsum("BTeA,eAD->BTeD", with_letters(config.sizes, LEGEND), dtype=dtype, keys=keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        first_BT1D, others_BTeD = jnp.split(by_stream(x, self.count), [1], axis=2)
        streams = [first_BT1D, as_large(self.streams(others_BTeD), first_BT1D)]
        return super().__call__(jnp.concatenate(streams, axis=2).mean(axis=2))


class Model(gemma4_text.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    config: Config

    def __init__(
        self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        keys = Keys((rngs or nnx.Rngs(2)).params())
        self.altup = Einsum("BTA,eAD->BTeD", with_letters(config.sizes, LEGEND), dtype=dtype, keys=keys)
        self.norm = MeanNorm(config, dtype=dtype, keys=keys)

    @property
    def input_modules(self) -> tuple[str, ...]:
        return ("altup", *super().input_modules)

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Returns the streams [B, T, (r D)] of the first layer: its input, and projections of it that are as large."""
        first_BT1D = x_BTD[:, :, None]
        streams = [first_BT1D, as_large(self.altup(first_BT1D[:, :, 0]), first_BT1D)]
        return jnp.concatenate(streams, axis=2).reshape(*x_BTD.shape[:2], -1)

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> Sequence[Any] | None:
        """Returns [B, T, p] for each layer. An id beyond the vocabulary of layers counts as 0."""
        known_BT = jnp.where(ids_BT < self.config.vocab_size_per_layer_input, ids_BT, 0)
        return super().layer_inputs(known_BT, x_BTD[..., : self.config.hidden_size])
