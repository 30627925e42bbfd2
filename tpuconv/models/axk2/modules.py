"""A.X K2: DeepSeek V3.2 (arXiv:2512.02556) with gates of norms and of attention's output."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.axk2.family import Config
from tpuconv.models.common import blocks
from tpuconv.models.common.layers import Einsum, Keys, RMSNorm
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.deepseek_v32 import modules as deepseek_v32
from tpuconv.notation.letters import with_letters

LEGEND = {"u": "both_queries", "d": "gate_rank"}
"""The words of this module, by the letters of its einsums and arrays."""


class GatedNorm(RMSNorm):
    """RMS norm, x [B, T, D] to [B, T, D]. Each element of its output has a gate, made of the output."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        super().__init__("D", sizes, config.rms_norm_eps, dtype=dtype)
        self.down = Einsum("BTD,Dd->BTd", sizes, dtype=dtype, keys=keys)
        self.up = Einsum("BTd,dD->BTD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x: jax.Array) -> jax.Array:
        y_BTD = super().__call__(x)
        gate_BTD = nnx.sigmoid(self.up(nnx.silu(self.down(y_BTD))).astype(jnp.float32))
        return (y_BTD * gate_BTD).astype(y_BTD.dtype)


class Attention(deepseek_v32.Attention):
    """DeepSeek V3.2's attention. Queries, and gates of the output, are computed from the latent vector of queries after
    its norm and before it."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        sizes = with_letters(config.sizes, LEGEND)
        self.q_nope = Einsum("BTu,uNP->BTNP", sizes, dtype=dtype, keys=keys)
        self.q_rope = Einsum("BTu,uNR->BTNR", sizes, dtype=dtype, keys=keys)
        self.gate = Einsum("BTu,uNH->BTNH", sizes, dtype=dtype, keys=keys)

    def query_latents(self, x_BTD: jax.Array) -> jax.Array:
        q_a: Any = self.q_a
        q_a_norm: Any = self.q_a_norm
        x_BTQ = q_a(x_BTD)
        return jnp.concatenate([q_a_norm(x_BTQ), x_BTQ], axis=-1)

    def visible(self, x_BTD: jax.Array, x_BTQ: jax.Array, kv: Any, step: Step, window: jax.Array | int) -> jax.Array:
        normed_BTQ = x_BTQ[..., : self.sizes["Q"]]
        return super().visible(x_BTD, normed_BTQ, kv, step, window)

    def gated(self, x_BTD: jax.Array, x_BTQ: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        return (y_BTNH * nnx.sigmoid(self.gate(x_BTQ).astype(jnp.float32))).astype(y_BTNH.dtype)


class Router(deepseek_v3.Router):
    """DeepSeek V3's router, in which an expert of another group may be chosen before one with a negative score."""

    outside = 0.0


class MoE(deepseek_v3.MoE):
    """The chosen experts and the shared ones, x [B, T, D] to [B, T, D]."""

    router_type = Router


class Block(blocks.PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections. Norms before
    attention and before experts have gates."""

    attention_type = Attention
    moe_type = MoE

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        self.attn_norm = GatedNorm(config, dtype=dtype, keys=keys)
        if hasattr(self, "moe"):
            self.mlp_norm = GatedNorm(config, dtype=dtype, keys=keys)


class Model(deepseek_v32.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    mtp_type: ClassVar[Any] = None
