"""Muse Spark, the text model: Muse Glimmer with experts, normalized outputs of heads and gated residual connections."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.layers import CenteredRMSNorm, Einsum, Keys, RMSNorm, normalize
from tpuconv.models.common.moe import GatedExperts
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.muse_glimmer import modules as muse_glimmer
from tpuconv.models.muse_spark.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"c": "expert_dim"}
"""The words of this module, by the letters of its einsums and arrays."""

LEAST_KEPT = 1e-3
"""The least square of the factor of a residual connection."""


class Attention(muse_glimmer.Attention):
    """Muse Glimmer's attention. The output of each head is normalized before its gate."""

    def gated(self, x_BTD: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return super().gated(x_BTD, normalize(y_BTNH, 1, self.eps).astype(x_BTD.dtype))


class FirstScaledRMSNorm(RMSNorm):
    """RMS norm of what is multiplied by 1 + w before, which is rounded to the dtype of x."""

    def __call__(self, x: jax.Array) -> jax.Array:
        scaled = (x.astype(jnp.float32) * (1 + self.scale[...].astype(jnp.float32))).astype(x.dtype)
        return normalize(scaled, 1, self.eps).astype(x.dtype)


class Router(deepseek_v3.Router):
    """DeepSeek V3's router, of which the products have a factor."""

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        config: Any = self.config
        logits_BTE: jax.Array = super().logits(x_BTD) * config.output_multiplier
        return logits_BTE


class MoE(GatedExperts):
    """The chosen experts, x [B, T, D] to [B, T, D]. They read a latent vector and write one, which is normalized for
    each of them."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        super().__init__({**sizes, "D": sizes["expert_dim"]}, nnx.silu, dtype=dtype, keys=keys)
        self.router = Router(config, dtype=dtype, keys=keys)  # type: ignore[arg-type]  # it has the same keys
        self.to_latent = Einsum("BTD,Dc->BTc", sizes, dtype=dtype, keys=keys)
        self.latent_norm = CenteredRMSNorm("c", sizes, config.rms_norm_eps, dtype=dtype)
        self.expert_norm = FirstScaledRMSNorm("c", sizes, config.post_norm_eps, dtype=dtype)
        self.from_latent = Einsum("BTc,cD->BTD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:  # type: ignore[override]
        x_BTc = self.latent_norm(self.to_latent(x_BTD))
        return self.from_latent(super().__call__(x_BTc, *self.router(x_BTD), self.expert_norm))


class GatedResidual(nnx.Module):
    """A residual connection with factors of its own for each element, a and b. With b = sigmoid(gate / temperature),
    a^2 + b^2 = 1."""

    def __init__(self, config: Config):
        self.gate = nnx.Param(jnp.zeros(config.sizes["D"], jnp.float32))
        self.temperature = config.residual_gate_temperature

    def __call__(self, x_BTD: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """Returns the hidden states [B, T, D] with the output `y_BTD` of a part."""
        gate_D = self.gate[...].astype(jnp.float32) / self.temperature
        b_D = nnx.sigmoid(gate_D)
        a_D = jnp.sqrt(jnp.maximum(nnx.sigmoid(-gate_D) * (1 + b_D), LEAST_KEPT))
        return (a_D * x_BTD + b_D * y_BTD).astype(x_BTD.dtype)


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each between two norms, with gated residual connections."""

    attention_type = Attention
    moe_type = MoE
    norm_type = CenteredRMSNorm

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.post_eps = config.post_norm_eps
        self.post_mlp_norm = FirstScaledRMSNorm("D", config.sizes, self.post_eps, dtype=dtype)
        self.attn_residual, self.mlp_residual = GatedResidual(config), GatedResidual(config)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        y_BTD, kv = self.attn(self.attn_norm(x_BTD), step, window, kv)
        x_BTD = self.attn_residual(x_BTD, normalize(y_BTD, 1, self.post_eps).astype(x_BTD.dtype))
        return self.mlp_residual(x_BTD, self.post_mlp_norm(self.fed(self.mlp_norm(x_BTD)))), kv


class Model(muse_glimmer.Model):
    """Token ids [B, T] to logits [B, T, V], which have a factor and a soft limit."""

    block: ClassVar[Any] = Block
