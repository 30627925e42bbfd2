"""Gemma 4, the text model."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import TanhMLP
from tpuconv.models.common.cache import KV, Cache, append_kv, empty_vectors
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import (
    Einsum,
    Embed,
    Keys,
    ScaledRMSNorm,
    apply_rope,
    attention,
    gelu_tanh,
    normal,
    normalize,
    soft_capped,
)
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.shared_keys import SharedKeysConfig
from tpuconv.models.common.steps import Step
from tpuconv.models.gemma4_text.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"h": "full_head_dim", "m": "full_kv_heads", "z": "all_layers", "p": "layer_dim"}
"""The words of this module, by the letters of its einsums and arrays."""


def head_letters(config: SharedKeysConfig, layer: int) -> tuple[str, str]:
    """Returns the letters of the head dimension and of the key-value heads of a layer."""
    return ("h", "m") if config.kinds[layer] == "full_attention" else ("H", "K")


class Attention(nnx.Module):
    """Grouped-query attention, x [B, T, D] to [B, T, D]. Also returns the keys and values of all tokens so far.
    Queries, keys and values are normalized, each head separately. A layer without keys and values of its own is given
    those of an earlier layer."""

    def __init__(self, config: SharedKeysConfig, layer: int, *, dtype: DTypeLike, keys: Keys):
        sizes, self.eps = with_letters(config.sizes, LEGEND), config.rms_norm_eps
        H, K = head_letters(config, layer)
        self.q = Einsum(f"BTD,DN{H}->BTN{H}", sizes, dtype=dtype, keys=keys)
        self.q_norm = ScaledRMSNorm(H, sizes, self.eps, dtype=dtype)
        self.o = Einsum(f"BTN{H},N{H}D->BTD", sizes, dtype=dtype, keys=keys)
        self.has_keys = config.kv_sources[layer] == layer
        if self.has_keys:
            self.k = Einsum(f"BTD,D{K}{H}->BT{K}{H}", sizes, dtype=dtype, keys=keys)
            self.k_norm = ScaledRMSNorm(H, sizes, self.eps, dtype=dtype)
            has_values = config.has_global_values or config.kinds[layer] != "full_attention"
            self.v = Einsum(f"BTD,D{K}{H}->BT{K}{H}", sizes, dtype=dtype, keys=keys) if has_values else None

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None) -> tuple[jax.Array, KV]:
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        q_BTNH = apply_rope(self.q_norm(self.q(x_BTD)), cos_sin)
        if self.has_keys:
            k_BTKH = self.k(x_BTD)
            v_BTKH = k_BTKH if self.v is None else self.v(x_BTD)
            v_BTKH = normalize(v_BTKH, 1, self.eps).astype(x_BTD.dtype)
            kv = append_kv(kv, apply_rope(self.k_norm(k_BTKH), cos_sin), v_BTKH, step.slot)
        assert kv is not None
        return self.o(attention(q_BTNH, kv, step.visible(window), scale=1.0)), kv


class MoE(GatedExperts):
    """The X most probable experts of each token, x [B, T, D] to [B, T, D]. The router reads other hidden states than
    the experts. The weights are probabilities, normalized, times a factor of each expert."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        super().__init__(sizes, gelu_tanh, dtype=dtype, keys=keys)
        self.config, self.chosen = config, config.top_k_experts or 0
        self.router = Einsum("BTD,DE->BTE", sizes, dtype=dtype, keys=keys)
        self.router_scale = nnx.Param(jnp.ones(sizes["D"], dtype))
        self.expert_scale = nnx.Param(jnp.ones(sizes["E"], dtype))

    def routed(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """Returns the output [B, T, D] of the experts for `y_BTD`. `x_BTD` are the hidden states that choose them."""
        scaled_BTD = normalize(x_BTD, 1, self.config.rms_norm_eps).astype(x_BTD.dtype) * self.router_scale[...]
        scores_BTE = self.router(scaled_BTD * self.config.hidden_size**-0.5)
        probs_BTE = nnx.softmax(placed(scores_BTE, "B T E").astype(jnp.float32))
        weights_BTX, ids_BTX = jax.lax.top_k(probs_BTE, self.chosen)
        weights_BTX /= weights_BTX.sum(axis=-1, keepdims=True)
        return self(y_BTD, ids_BTX, weights_BTX * self.expert_scale[...].astype(jnp.float32)[ids_BTX])


class Block(nnx.Module):
    """One layer: attention, MLP and experts side by side, and the layer's own embeddings, each between norms, with
    residual connections. At the end all is multiplied by `layer_scalar`."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        def norm() -> ScaledRMSNorm:
            return ScaledRMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)

        self.attn_norm, self.post_attn_norm = norm(), norm()
        self.attn = Attention(config, layer, dtype=dtype, keys=keys)
        self.mlp_norm, self.post_mlp_norm = norm(), norm()
        self.mlp = TanhMLP(
            config, "wide_mlp" if layer in config.layer_sets["wide_layers"] else "F", dtype=dtype, keys=keys
        )
        if config.enable_moe_block:
            self.post_mlp_norm_1, self.moe_norm, self.post_moe_norm = norm(), norm(), norm()
            self.moe = MoE(config, dtype=dtype, keys=keys)
        if config.has_layer_inputs:
            sizes = with_letters(config.sizes, LEGEND)
            self.per_layer_gate = Einsum("BTD,Dp->BTp", sizes, dtype=dtype, keys=keys)
            self.per_layer_projection = Einsum("BTp,pD->BTD", sizes, dtype=dtype, keys=keys)
            self.post_per_layer_norm = norm()
        self.layer_scalar = nnx.Param(jnp.ones(1, jnp.float32))

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: KV | None
    ) -> tuple[jax.Array, KV | None]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + self.post_attn_norm(y_BTD)
        y_BTD = self.mlp(self.mlp_norm(x_BTD))
        if hasattr(self, "moe"):
            experts_BTD = self.moe.routed(x_BTD, self.moe_norm(x_BTD))
            y_BTD = self.post_mlp_norm_1(y_BTD) + self.post_moe_norm(experts_BTD)
        x_BTD = x_BTD + self.post_mlp_norm(y_BTD)
        if step.input is not None:
            y_BTD = self.per_layer_projection(gelu_tanh(self.per_layer_gate(x_BTD)) * step.input)
            x_BTD = x_BTD + self.post_per_layer_norm(y_BTD)
        return x_BTD * self.factor(step)[...].astype(x_BTD.dtype), kv

    def factor(self, step: Step) -> nnx.Param[jax.Array]:
        """Returns the factor [1] of the output."""
        return self.layer_scalar


class LayerEmbed(Embed):
    """The embedding [B, T, z, p] of each token for each layer."""

    def __init__(self, sizes: Mapping[str, int], *, dtype: DTypeLike, keys: Keys):
        self.embedding = nnx.Param(
            normal(keys(), (sizes["layer_vocab"], sizes["all_layers"], sizes["layer_dim"]), dtype)
        )


class ProjectedInputs(nnx.Module):
    """The inputs of each layer besides the hidden states: a projection of the first layer's input."""

    def __init__(self, config: SharedKeysConfig, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        sizes = with_letters(config.sizes, LEGEND)
        self.projection = Einsum("BTD,Dzp->BTzp", sizes, dtype=dtype, keys=keys)
        self.norm = ScaledRMSNorm("p", sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, ids_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Returns [B, T, z, p]."""
        projected_BTzp: jax.Array = self.norm(self.projection(x_BTD) * self.config.hidden_size**-0.5)
        return projected_BTzp


class LayerInputs(ProjectedInputs):
    """The same, and the token's embedding for the layer."""

    def __init__(self, config: SharedKeysConfig, *, dtype: DTypeLike, keys: Keys):
        self.embed = LayerEmbed(config.sizes, dtype=dtype, keys=keys)
        super().__init__(config, dtype=dtype, keys=keys)

    def __call__(self, ids_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Returns [B, T, z, p]."""
        factor: jax.Array = jnp.float32(self.config.hidden_size_per_layer_input**0.5).astype(x_BTD.dtype)
        return (super().__call__(ids_BT, x_BTD) + self.embed(ids_BT) * factor) * 2**-0.5


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    norm_type = ScaledRMSNorm
    inputs_type: ClassVar[Any] = LayerInputs
    config: SharedKeysConfig

    def __init__(
        self, config: SharedKeysConfig, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        if config.has_layer_inputs:
            keys = Keys((rngs or nnx.Rngs(1)).params())
            self.per_layer = self.inputs_type(config, dtype=dtype, keys=keys)

    @property
    def input_modules(self) -> tuple[str, ...]:
        return ("per_layer",) if self.config.has_layer_inputs else ()

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> Cache:
        """As `Decoder.init_cache`. Layers that use the keys and values of an earlier one have no cache."""
        dtype = self.embed.embedding.dtype if dtype is None else dtype
        sizes, layers = with_letters(self.config.sizes, LEGEND), []
        for layer, source in enumerate(self.config.kv_sources):
            H, K = head_letters(self.config, layer)
            shape = (batch, length, sizes[K], sizes[H])
            (k, k_scale), (v, v_scale) = empty_vectors(shape, dtype), empty_vectors(shape, dtype)
            layers.append(KV(k, v, k_scale, v_scale) if source == layer else None)
        return Cache.empty(tuple(layers), batch, length)

    def scaled(self, x_BTD: jax.Array) -> jax.Array:
        """Multiplies the embeddings by sqrt(D), rounded to their dtype. Returns [B, T, D]."""
        factor: jax.Array = jnp.float32(self.config.hidden_size**0.5).astype(x_BTD.dtype)
        return x_BTD * factor

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> Sequence[Any] | None:
        """Returns [B, T, p] for each layer, or None without embeddings of layers."""
        if not self.config.has_layer_inputs:
            return None
        inputs_BTzp = self.per_layer(ids_BT, x_BTD)
        return [inputs_BTzp[:, :, layer] for layer in range(self.config.num_hidden_layers)]

    def source_of(self, layer: int) -> int | None:
        """Returns the layer whose keys and values a layer without own ones uses."""
        source = self.config.kv_sources[layer]
        return None if source == layer else source

    def kept(self, layer: int, result: Any) -> Any:
        return result if self.config.kv_sources[layer] == layer else None

    def adjusted(self, logits_BTV: jax.Array) -> jax.Array:
        """Limits the logits [B, T, V] softly."""
        return soft_capped(logits_BTV, self.config.final_logit_softcapping)
