"""LongCat-Flash (arXiv:2509.01322): two attentions and two MLPs in a layer, and experts beside the second ones."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import mtp
from tpuconv.models.common.blocks import GatedMLP, PreNormBlock
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Einsum, Embed, Keys, RMSNorm, exact_product, times
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.placement import placed
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.deepseek_v3.modules import Latent
from tpuconv.models.longcat_flash.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"z": "router_outputs"}
"""The words of this module, by the letters of its einsums and arrays."""


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention. Queries and latent vectors have a factor: the square root of how much narrower their
    latent vector is than the model."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.q_factor = (config.hidden_size / config.q_lora_rank) ** 0.5
        self.c_factor = (config.hidden_size / config.kv_lora_rank) ** 0.5

    def queries(self, x_BTQ: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNP, q_BTNR = times(self.q_nope(x_BTQ), self.q_factor), times(self.q_rope(x_BTQ), self.q_factor)
        return q_BTNP, self._rotated(q_BTNR, step)

    def latents(self, x_BTD: jax.Array, step: Step) -> Latent:
        latent: Latent = super().latents(x_BTD, step)
        return Latent(times(latent.c_BSC, self.c_factor), latent.k_BSR)


class Router(nnx.Module):
    """x [B, T, D] to the ids and weights [B, T, X] of each token's experts: probabilities, times a factor. `correction`
    balances how often experts are chosen, and does not change the weights. Computed in float32."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.chosen, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        sizes = with_letters(config.sizes, LEGEND)
        self.kernel = Einsum("BTD,Dz->BTz", sizes, dtype=dtype, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(sizes["z"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores_BTz = exact_product("BTD,Dz->BTz", x_BTD, self.kernel[...])
        probs_BTz = placed(nnx.softmax(scores_BTz), "B T router_outputs")
        ids_BTX = jax.lax.top_k(probs_BTz + self.correction[...].astype(jnp.float32), self.chosen)[1]
        return ids_BTX, jnp.take_along_axis(probs_BTz, ids_BTX, axis=-1) * self.factor


class MoE(GatedExperts):
    """The chosen experts, x [B, T, D] to [B, T, D]. Those with the highest ids return their input."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config.sizes, nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        ids_BTX, weights_BTX = self.router(x_BTD)
        is_real_BTX = ids_BTX < self.gate.kernel.shape[0]
        kept_BT1 = jnp.where(is_real_BTX, 0, weights_BTX).sum(axis=-1, keepdims=True)
        ids_BTX, weights_BTX = jnp.where(is_real_BTX, ids_BTX, 0), jnp.where(is_real_BTX, weights_BTX, 0)
        y_BTD = super().__call__(x_BTD, ids_BTX, weights_BTX)
        return y_BTD + (x_BTD.astype(jnp.float32) * kept_BT1).astype(x_BTD.dtype)


class Half(nnx.Module):
    """Attention and an MLP, each after a norm, with residual connections. Also returns what the MLP reads."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.attn_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.attn = Attention(config, dtype=dtype, keys=keys)
        self.mlp_norm = RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Latent | None
    ) -> tuple[jax.Array, jax.Array, Latent]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = x_BTD + y_BTD
        y_BTD = self.mlp_norm(x_BTD)
        return x_BTD + self.mlp(y_BTD), y_BTD, kv


class Block(nnx.Module):
    """One layer: two times attention and an MLP, and experts that read what the first MLP reads."""

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        self.first = Half(config, dtype=dtype, keys=keys)
        self.second = Half(config, dtype=dtype, keys=keys)
        self.moe = MoE(config, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: tuple[Latent, Latent] | None
    ) -> tuple[jax.Array, tuple[Latent, Latent]]:
        first, second = (None, None) if kv is None else kv
        x_BTD, y_BTD, first = self.first(x_BTD, step, window, first)
        y_BTD = self.moe(y_BTD)
        x_BTD, _, second = self.second(x_BTD, step, window, second)
        return x_BTD + y_BTD, (first, second)


class MTPLayer(mtp.MTPLayer, PreNormBlock):
    """The layer for multi-token prediction: one attention and one MLP."""

    attention_type = Attention


class MTPModule(mtp.MTPModule):
    """The module for multi-token prediction. It has embeddings of its own."""

    layer_type = MTPLayer

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.embed = Embed(config.sizes, dtype=dtype, keys=keys)


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = MTPModule

    def mtp_inputs(self, next_BT: jax.Array, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.mtp.embed(next_BT), self.norm(x_BTD)

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty caches of the two attentions of a layer; `shape` is [B, S], or [L, B, S] for all layers.
        The layer for multi-token prediction has one."""
        if layer == config.num_hidden_layers:
            return Latent.empty(config, layer, shape, dtype)
        return tuple(Latent.empty(config, layer, shape, dtype) for _ in range(2))
