"""The text model of Llama 3.2 Vision: the layers of Llama, and between them layers that attend to images."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.across import Across, AcrossKV, SeenSlots
from tpuconv.models.common.blocks import GatedMLP, PreNormBlock
from tpuconv.models.common.cache import KV, append_kv, empty_vectors
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Embed, Keys, RMSNorm, attention
from tpuconv.models.common.steps import Step
from tpuconv.models.mllama_text_model.family import Config
from tpuconv.notation.letters import with_letters


class CrossAttention(nnx.Module):
    """Grouped-query attention of tokens to features of images, x [B, T, D] to [B, T, D]. Queries and keys have norms,
    and no positions."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = config.sizes
        self.q = Einsum("BTD,DNH->BTNH", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BSD,DKH->BSKH", sizes, dtype=dtype, keys=keys)
        self.v = Einsum("BSD,DKH->BSKH", sizes, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, dtype=dtype, keys=keys)
        self.q_norm = RMSNorm("H", sizes, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm("H", sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, kv: KV, sees_BTS: jax.Array) -> jax.Array:
        return self.o(attention(self.q_norm(self.q(x_BTD)), kv, sees_BTS))

    def read(self, features_BSD: jax.Array, kv: KV | None) -> KV:
        """Returns the keys and values of features, in the dtype of a layer's cache, if there is one."""
        k_BSKH, v_BSKH = self.k_norm(self.k(features_BSD)), self.v(features_BSD)
        if kv is not None and kv.k_BSKH.shape != k_BSKH.shape:
            (k, k_scale), (v, v_scale) = (empty_vectors(x.shape, kv.k_BSKH.dtype) for x in (k_BSKH, v_BSKH))
            kv = KV(k, v, k_scale, v_scale)
        return append_kv(kv, k_BSKH, v_BSKH, 0)


class CrossBlock(nnx.Module):
    """One layer: attention to images, then an MLP, each after a norm, with residual connections whose gates are
    learned. Without images it returns its input. As in transformers, a token that comes before all images attends to
    all of them, and its MLP adds nothing."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = CrossAttention(config, dtype=dtype, keys=keys)
        self.mlp_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype, keys=keys)
        self.attn_gate, self.mlp_gate = (nnx.Param(jnp.zeros(1, dtype)) for _ in range(2))

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: AcrossKV | None
    ) -> tuple[jax.Array, AcrossKV | None]:
        if (images := step.across) is not None:
            sees_BTS = images.sees()
            kv = self._read(images, step, kv)
        elif kv is None or not kv[0].k_BSKH.shape[1]:
            return x_BTD, kv
        else:
            sees_BTS = jnp.repeat(kv[1].is_seen_BS[:, None], x_BTD.shape[1], axis=1)
        sees_some_BT1 = sees_BTS.any(axis=-1, keepdims=True)
        y_BTD = self.attn(self.attn_norm(x_BTD), kv[0], sees_BTS | ~sees_some_BT1)
        x_BTD = x_BTD + jnp.tanh(self.attn_gate[...]) * y_BTD
        y_BTD = jnp.where(sees_some_BT1, self.mlp(self.mlp_norm(x_BTD)), 0)
        return x_BTD + jnp.tanh(self.mlp_gate[...]) * y_BTD, kv

    def _read(self, images: Across, step: Step, kv: AcrossKV | None) -> AcrossKV:
        """Returns the cache with the images of a call, in place of earlier ones."""
        return self.attn.read(images.features_BSD, None if kv is None else kv[0]), SeenSlots(images.later(step.pos_BT))


def new_block(config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> PreNormBlock | CrossBlock:
    """Returns a layer."""
    if layer in config.layer_sets["cross_layers"]:
        return CrossBlock(config, dtype=dtype, keys=keys)
    return PreNormBlock(config, layer, dtype=dtype, keys=keys)


class LongerEmbed(Embed):
    """An embedding with more rows than the head."""

    def __init__(self, sizes: Any, *, dtype: DTypeLike, keys: Keys):
        super().__init__(with_letters(sizes, {"V": "token_rows"}), dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = staticmethod(new_block)
    embed_type = LongerEmbed

    @staticmethod
    def cached(config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> KV | AcrossKV:
        """Returns the empty cache of a layer; `shape` is [B, S], or [L, B, S] for several layers."""
        if layer not in config.layer_sets["cross_layers"]:
            return KV.empty(config, layer, shape, dtype)
        none = (*shape[:-1], 0)
        return KV.empty(config, layer, none, dtype), SeenSlots(jnp.zeros(none, bool))
