"""Ling 3 (Bailing, hybrid): Kimi delta attention with bounded decays, and latent attention with a gate for each
head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.bailing_hybrid.family import Config
from tpuconv.models.common import mtp
from tpuconv.models.common.kda import LEGEND, KimiDelta
from tpuconv.models.common.layers import Einsum, Keys
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.kimi_linear import modules as kimi_linear
from tpuconv.notation.letters import with_letters


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention; the output of each head has a gate."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.gate = Einsum("BTD,DN->BTN", config.sizes, dtype=dtype, keys=keys)

    def gated(self, x_BTD: jax.Array, x_BTQ: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        gate_BTN = nnx.sigmoid(self.gate(x_BTD).astype(jnp.float32)).astype(x_BTD.dtype)
        return y_BTNH * gate_BTN[..., None]


class DeltaAttention(KimiDelta):
    """Kimi delta attention whose rates of decay and gates are made by one matrix each. Decays are bounded, or as
    Kimi's; their logarithms are rounded to the dtype of activations."""

    def add_gates(self, config: Any, *, dtype: DTypeLike, keys: Keys) -> None:
        sizes = with_letters(config.sizes, LEGEND)
        self.f = Einsum("BTD,Dnk->BTnk", sizes, dtype=dtype, keys=keys)
        self.g = Einsum("BTD,Dnw->BTnw", sizes, dtype=dtype, keys=keys)
        self.bound = config.kda_lower_bound if config.kda_safe_gate else None

    def rates(self, x_BTD: jax.Array) -> jax.Array:
        return self.bounded(self.f(x_BTD)).astype(x_BTD.dtype).astype(jnp.float32)

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        return self.g(x_BTD)


class Block(kimi_linear.Block):
    """One layer: linear or latent attention, then experts or an MLP, each after a norm, with residual connections."""

    attention_type = Attention
    mixer_type = DeltaAttention


class Model(kimi_linear.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = mtp.mtp_module(Block)
