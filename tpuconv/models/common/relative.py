"""Learned relative positions, and the short convolutions beside them (Inkling)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys
from tpuconv.models.common.placement import placed, rules_for
from tpuconv.models.common.recurrence import Convolution, LayerState, PackedTokens
from tpuconv.models.common.sinks import softmax_with_sinks
from tpuconv.models.common.steps import Step
from tpuconv.notation.letters import with_letters

LEGEND = {"r": "relative_dim", "e": "relative_extent"}
"""The words of this module, by the letters of its einsums and arrays."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ConvolutionStates(LayerState):
    """The last inputs of the convolutions of a layer: of keys, values and the outputs of attention and of the MLP."""

    axes: ClassVar[tuple[str, ...]] = ("B taps K H", "B taps K H", "B taps D", "B taps D")

    k_BcKH: jax.Array
    v_BcKH: jax.Array
    attn_BcD: jax.Array
    mlp_BcD: jax.Array


class ResidualConvolution(Convolution):
    """A causal convolution of each channel along the tokens, to which its input is added. `letters` are the letters of
    the channels."""

    def smoothed(self, x: jax.Array, step: Step, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output for x [B, T, ...], and the last inputs [B, c - 1, ...], as `last` has them of the tokens
        before. Sums are in float32."""
        packed = PackedTokens.of(x.astype(jnp.float32).reshape(*x.shape[:2], -1), step)
        y, last = self(packed.x_BTD.reshape(x.shape), last, packed.length_B)
        y = packed.unpacked(y.reshape(packed.x_BTD.shape)).reshape(x.shape)
        return self.scaled(y + x.astype(jnp.float32)).astype(x.dtype), last

    def scaled(self, y: jax.Array) -> jax.Array:
        """Returns the sum of the convolution and its input. Families with a factor override this."""
        return y


class RelativePositions(nnx.Module):
    """Biases of scores by the distance of a key, x [B, T, D] to [B, N, T, S]: for each head, a token mixes learned
    profiles of the distances. Keys that are `relative_extent` or more tokens away have none."""

    def __init__(self, sizes: Any, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(sizes, LEGEND)
        self.mix = Einsum("BTD,DNr->BTNr", sizes, dtype=dtype, keys=keys)
        self.profiles = Einsum("BTNr,re->BNTe", sizes, dtype=dtype, keys=keys)
        self.extent = sizes["e"]

    def __call__(self, x_BTD: jax.Array, step: Step) -> jax.Array:
        bias_BNTe = self.profiles(self.mixed(self.mix(x_BTD), step))
        distance_BTS = step.pos_BT[:, :, None] - step.pos_BS[:, None, :]
        at_BTS = jnp.clip(distance_BTS, 0, self.extent - 1)
        bias_BNTS = jnp.take_along_axis(bias_BNTe, at_BTS[:, None], axis=-1)
        return jnp.where(((distance_BTS >= 0) & (distance_BTS < self.extent))[:, None], bias_BNTS, 0)

    def mixed(self, mix_BTNr: jax.Array, step: Step) -> jax.Array:
        """Returns the weights of the profiles. Families that limit or scale them override this."""
        return mix_BTNr


def temperature(step: Step, floor: int, alpha: float) -> jax.Array:
    """Returns the factor [B, T] of queries at late positions, 1 + alpha log(max((position + 1) / floor, 1)), in
    float32."""
    return 1 + alpha * jnp.log(jnp.maximum((step.pos_BT + 1).astype(jnp.float32) / floor, 1))


def attention_with_bias(
    q_BTNH: jax.Array,
    kv: KV,
    visible_BTS: jax.Array,
    bias_BNTS: jax.Array,
    scale: float,
    sinks_BTN: jax.Array | None = None,
) -> jax.Array:
    """Returns softmax attention [B, T, N, H], where each token has a bias for each key, and a score of a key without a
    value in `sinks_BTN` if it is given."""
    B, T, N, H = q_BTNH.shape
    K = kv.k_BSKH.shape[2]
    q_BTKGH = placed(q_BTNH.reshape(B, T, K, N // K, H), "B T K G H", rules_for(kv))
    scores_BKGTS = kv.scores(q_BTKGH) * scale
    scores_BKGTS += bias_BNTS.astype(jnp.float32).reshape(scores_BKGTS.shape)
    scores_BKGTS = jnp.where(visible_BTS[:, None, None], scores_BKGTS, MASKED_SCORE)
    if sinks_BTN is None:
        weights_BKGTS = jax.nn.softmax(scores_BKGTS, axis=-1)
    else:
        weights_BKGTS = softmax_with_sinks(scores_BKGTS, jnp.moveaxis(sinks_BTN, 1, -1).reshape(B, K, N // K, T, 1))
    y_BTKGH = kv.weighted_values(weights_BKGTS, q_BTNH.dtype)
    return placed(y_BTKGH.reshape(B, T, N, -1), "B T N H").astype(q_BTNH.dtype)
