"""Ling and Ring 2.5 and 2.6 (Bailing): lightning attention with rotary positions, and latent attention."""

from typing import Any, ClassVar

import jax
import numpy as np
from jax.typing import DTypeLike

from tpuconv.models.common import mtp
from tpuconv.models.common.alibi import alibi_slopes
from tpuconv.models.common.layers import Keys, RMSNorm, apply_rope, normalize, times
from tpuconv.models.common.lightning import LEGEND, LightningAttention, LightningBlock, LightningDecoder
from tpuconv.models.common.steps import Step
from tpuconv.models.kimi_linear import modules as kimi_linear
from tpuconv.notation.letters import with_letters


def alibi_decays(config: Any, layer: int) -> np.ndarray:
    """Returns by how much the logarithm of the state of each head decays with each token [n], as the release's
    `BailingMoeV2_5LinearAttention` does: the slopes of ALiBi (arXiv:2108.12409) times a factor of the layer, which
    falls from a little over 1 in the first layer to nearly 0 behind the last one."""
    factor = 1 - (layer - 1) / (config.num_hidden_layers - 1) + 1e-5
    rates_n: np.ndarray = (alibi_slopes(config.num_attention_heads) * factor).astype(np.float32)
    return rates_n


class GroupedNorm(RMSNorm):
    """RMS norm of an output [B, T, n, w], each of `groups` equal parts of all its elements separately."""

    def __init__(self, sizes: Any, groups: int, eps: float, *, dtype: DTypeLike):
        super().__init__("nw", sizes, eps, dtype=dtype)
        self.groups = groups

    def __call__(self, x: jax.Array) -> jax.Array:
        parts = normalize(x.reshape(*x.shape[:2], self.groups, -1), 1, self.eps)
        return parts.reshape(x.shape).astype(x.dtype) * self.scale[...]


class LinearAttention(LightningAttention):
    """Lightning attention whose queries and keys are normalized and get rotary positions; the output is normalized in
    groups."""

    rates = alibi_decays

    def __init__(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, layer, dtype=dtype, keys=keys)
        sizes = with_letters(config.sizes, LEGEND)
        self.q_norm, self.k_norm = (RMSNorm("k", sizes, config.rms_norm_eps, dtype=dtype) for _ in range(2))

    def new_norm(self, sizes: Any, *, dtype: DTypeLike) -> GroupedNorm:
        return GroupedNorm(sizes, self.config.group_norm_size, self.config.rms_norm_eps, dtype=dtype)

    def heads(self, x_BTD: jax.Array, step: Step) -> tuple[jax.Array, jax.Array, jax.Array]:
        cos_sin = step.cos_sin_in(x_BTD.dtype)
        q_BTnk = apply_rope(self.q_norm(self.q(x_BTD)), cos_sin)
        k_BTnk = apply_rope(self.k_norm(self.k(x_BTD)), cos_sin)
        return times(q_BTnk, q_BTnk.shape[-1] ** -0.5), k_BTnk, self.v(x_BTD)


class Block(LightningBlock, kimi_linear.Block):
    """One layer: linear or latent attention, then experts or an MLP, each after a norm, with residual connections."""

    mixer_type: ClassVar[Any] = LinearAttention


class Model(LightningDecoder, kimi_linear.Model):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    mtp_type = mtp.mtp_module(Block)
