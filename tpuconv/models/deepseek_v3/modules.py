"""DeepSeek V3 (arXiv:2412.19437)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common import mtp
from tpuconv.models.common.blocks import PreNormBlock
from tpuconv.models.common.cache import empty_vectors, to_compute_dtype, write_slots
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import MASKED_SCORE, Einsum, Keys, RMSNorm, apply_rope, deinterleave, exact_product
from tpuconv.models.common.moe import RoutedExperts
from tpuconv.models.common.placement import placed, rules_for
from tpuconv.models.common.steps import Step
from tpuconv.models.deepseek_v3.family import Config
from tpuconv.notation.sharding import ACTIVATIONS, Rules

LATENT_EPS = 1e-6
"""Epsilon of the norms of latent vectors. config.json has only the epsilon of the other norms."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Latent:
    """The cache of a layer: for each token the latent vector of all heads' keys and values, and the rotary key that all
    heads share. An int8 cache has scales. `axes` are the letters of each array."""

    axes: ClassVar[tuple[str, ...]] = ("B S C", "B S R", "B S", "B S")

    c_BSC: jax.Array
    k_BSR: jax.Array
    c_scale_BS: jax.Array | None = None
    k_scale_BS: jax.Array | None = None

    @classmethod
    def empty(cls, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Returns a cache of zeros for a layer; `shape` is [B, S]."""
        latents, keys = (
            empty_vectors((*shape, config.sizes["C"]), dtype),
            empty_vectors((*shape, config.sizes["R"]), dtype),
        )
        return cls(latents[0], keys[0], latents[1], keys[1])

    def latents(self, dtype: DTypeLike) -> jax.Array:
        """Returns the latent vectors [B, S, C] in `dtype`. Those of an int8 cache are not multiplied by their scales:
        the caller multiplies products with them."""
        return to_compute_dtype(self.c_BSC, dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlainLatent:
    """The latent vectors of a layer without rotary positions. An int8 cache has scales. `axes` are the letters of each
    array."""

    axes: ClassVar[tuple[str, ...]] = ("B S C", "B S")

    c_BSC: jax.Array
    c_scale_BS: jax.Array | None = None

    @classmethod
    def empty(cls, config: Config, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        """Returns a cache of zeros for a layer; `shape` is [B, S]."""
        return cls(*empty_vectors((*shape, config.sizes["C"]), dtype))

    def with_keys(self) -> Latent:
        """Returns these latent vectors with rotary keys of 0 dimensions."""
        k_BSR = jnp.zeros((*self.c_BSC.shape[:-1], 0), self.c_BSC.dtype)
        return Latent(self.c_BSC, k_BSR, self.c_scale_BS)


class Attention(nnx.Module):
    """Multi-head latent attention (arXiv:2405.04434), x [B, T, D] to [B, T, D]. Also returns the cache of all tokens so
    far. The queries and keys of a head have P dimensions without and R dimensions with rotary position."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, bias = config.sizes, config.attention_bias
        self.sizes, self.interleaved, self.score_scale = sizes, config.rope_interleave, config.score_scale
        self.q_a = Einsum("BTD,DQ->BTQ", sizes, bias=bias, dtype=dtype, keys=keys) if config.has_query_latent else None
        self.q_a_norm = RMSNorm("Q", sizes, LATENT_EPS, dtype=dtype) if config.has_query_latent else None
        self.q_nope = Einsum("BTQ,QNP->BTNP", sizes, dtype=dtype, keys=keys)  # without q_a, Q is D
        self.q_rope = Einsum("BTQ,QNR->BTNR", sizes, dtype=dtype, keys=keys)
        self.kv_a = Einsum("BTD,DC->BTC", sizes, bias=bias, dtype=dtype, keys=keys)
        self.k_rope = Einsum("BTD,DR->BTR", sizes, bias=bias, dtype=dtype, keys=keys)
        self.kv_a_norm = RMSNorm("C", sizes, LATENT_EPS, dtype=dtype)
        self.k_b = Einsum("BSC,CNP->BSNP", sizes, dtype=dtype, keys=keys)
        self.v_b = Einsum("BSC,CNH->BSNH", sizes, dtype=dtype, keys=keys)
        self.o = Einsum("BTNH,NHD->BTD", sizes, bias=bias, dtype=dtype, keys=keys)

    def __call__(
        self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Latent | None
    ) -> tuple[jax.Array, Latent]:
        x_BTQ = self.query_latents(x_BTD)
        kv = self.appended(kv, self.latents(x_BTD, step), step)
        visible_BTS = self.visible(x_BTD, x_BTQ, kv, step, window)
        return self.attend(x_BTD, x_BTQ, kv, step, visible_BTS), kv

    def query_latents(self, x_BTD: jax.Array) -> jax.Array:
        """Returns what queries are computed from: their latent vectors [B, T, Q], or the hidden states."""
        return x_BTD if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x_BTD))

    def queries(self, x_BTQ: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        """Returns the parts of the queries without and with rotary positions, [B, T, N, P] and [B, T, N, R]."""
        return self.q_nope(x_BTQ), self._rotated(self.q_rope(x_BTQ), step)

    def latents(self, x_BTD: jax.Array, step: Step) -> Any:
        """Returns what the cache holds of these tokens."""
        k_BTR = self._rotated(self.k_rope(x_BTD)[:, :, None], step)[:, :, 0]
        return Latent(self.kv_a_norm(self.kv_a(x_BTD)), k_BTR)

    def appended(self, kv: Any, new: Any, step: Step) -> Any:
        """Returns the cache with what it holds of this step's tokens; without a cache this alone."""
        rules = rules_for(_placed_as_cache(new, ACTIVATIONS) if kv is None else kv)
        new = _placed_as_cache(new, rules)
        return new if kv is None else write_slots(kv, new, step.slot)

    def visible(self, x_BTD: jax.Array, x_BTQ: jax.Array, kv: Any, step: Step, window: jax.Array | int) -> jax.Array:
        """Returns the mask [B, T, S] of the tokens that each token attends to."""
        return step.visible(window)

    def attend(self, x_BTD: jax.Array, x_BTQ: jax.Array, kv: Latent, step: Step, visible_BTS: jax.Array) -> jax.Array:
        """Returns the output [B, T, D] of attention to the visible tokens."""
        return self.o(self.gated(x_BTD, x_BTQ, self.weighted_values(*self.queries(x_BTQ, step), kv, visible_BTS)))

    def gated(self, x_BTD: jax.Array, x_BTQ: jax.Array, y_BTNH: jax.Array) -> jax.Array:
        """Returns the output [B, T, N, H] of each head, which gates made of `x_BTD` or `x_BTQ` may change."""
        return y_BTNH

    def softmax(self, scores_BNTS: jax.Array) -> jax.Array:
        """Returns the attention weights [B, N, T, S]."""
        return nnx.softmax(scores_BNTS)

    def weighted_values(self, q_BTNP: jax.Array, q_BTNR: jax.Array, kv: Latent, visible_BTS: jax.Array) -> jax.Array:
        """Returns the output [B, T, N, H] of each head."""
        T, S = visible_BTS.shape[1:]
        C, P, H = (self.sizes[letter] for letter in "CPH")
        # Choose the form with fewer multiplications per head. Expanded: keys and values of S tokens, then scores and
        # sums of width P + H. Absorbed: queries and outputs of T tokens in the latent space, then scores and sums of
        # width C.
        expanded, absorbed = S * C * (P + H) + T * S * (P + H), T * C * (P + H) + T * S * 2 * C
        y_BTNH = (self._expanded if expanded <= absorbed else self._absorbed)(q_BTNP, q_BTNR, kv, visible_BTS)
        return placed(y_BTNH, "B T N H")

    def _rotated(self, x_BTNR: jax.Array, step: Step) -> jax.Array:
        return apply_rope(deinterleave(x_BTNR) if self.interleaved else x_BTNR, step.cos_sin_in(x_BTNR.dtype))

    def _expanded(self, q_BTNP: jax.Array, q_BTNR: jax.Array, kv: Latent, visible_BTS: jax.Array) -> jax.Array:
        """Attention [B, T, N, H] with the keys and values of each head."""
        c_BSC = kv.latents(q_BTNP.dtype)
        scores_BNTS = jnp.einsum("BTNP,BSNP->BNTS", q_BTNP, self.k_b(c_BSC), preferred_element_type=jnp.float32)
        weights_BNTS = self._weights(scores_BNTS, q_BTNR, kv, visible_BTS)
        return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, self.v_b(c_BSC))

    def _absorbed(self, q_BTNP: jax.Array, q_BTNR: jax.Array, kv: Latent, visible_BTS: jax.Array) -> jax.Array:
        """Attention [B, T, N, H] with the latent vectors as keys and values of all heads: `k_b` is applied to the
        queries, `v_b` to the weighted sums. Mathematically the same, and a step only reads the cache."""
        rules, c_BSC = rules_for(kv), kv.latents(q_BTNP.dtype)
        # The cache has no heads to be divided by: where the chips of a mesh divide the batch, heads change over to it.
        q_BTNC = self.k_b.product("BTNP,CNP->BTNC", q_BTNP)
        both = placed(jnp.concatenate([q_BTNC, q_BTNR], axis=-1), "B T N (C + R)", rules)
        q_BTNC, q_BTNR = jnp.split(both, [self.sizes["C"]], axis=-1)
        scores_BNTS = jnp.einsum("BTNC,BSC->BNTS", q_BTNC, c_BSC, preferred_element_type=jnp.float32)
        weights_BNTS = self._weights(scores_BNTS, q_BTNR, kv, visible_BTS)
        y_BTNC = placed(jnp.einsum("BNTS,BSC->BTNC", weights_BNTS, c_BSC), "B T N C", rules)
        return self.v_b.product("BTNC,CNH->BTNH", placed(y_BTNC, "B T N C"))

    def _weights(self, scores_BNTS: jax.Array, q_BTNR: jax.Array, kv: Latent, visible_BTS: jax.Array) -> jax.Array:
        """Returns the attention weights [B, N, T, S], multiplied by the scales of the latent vectors. `scores_BNTS` are
        the scores without rotary position."""
        k_BSR = to_compute_dtype(kv.k_BSR, q_BTNR.dtype)
        rotary_BNTS = jnp.einsum("BTNR,BSR->BNTS", q_BTNR, k_BSR, preferred_element_type=jnp.float32)
        scores_BNTS = _scaled(scores_BNTS, kv.c_scale_BS) + _scaled(rotary_BNTS, kv.k_scale_BS)
        scores_BNTS = jnp.where(visible_BTS[:, None], scores_BNTS * self.score_scale, MASKED_SCORE)
        return _scaled(self.softmax(scores_BNTS), kv.c_scale_BS).astype(q_BTNR.dtype)


def _placed_as_cache(new: Any, rules: Rules) -> Any:
    """Returns the entries of a cache for the tokens of a step, with a sharding constraint on the current mesh."""
    leaves, treedef = jax.tree.flatten(new)
    axes = (letters.replace("S", "T") for letters in type(new).axes)
    return jax.tree.unflatten(treedef, [placed(x, letters, rules) for x, letters in zip(leaves, axes, strict=False)])


def _scaled(x_BNTS: jax.Array, scale_BS: jax.Array | None) -> jax.Array:
    return x_BNTS if scale_BS is None else x_BNTS * scale_BS[:, None, None]


class Router(nnx.Module):
    """The router (arXiv:2412.19437, section 2.1.2): x [B, T, D] to the ids and weights [B, T, X] of each token's
    experts. First groups of experts are chosen, then X experts of these groups. `correction` balances how often experts
    are chosen, and does not change the weights. Computed in float32: a small error of a score may choose another
    expert.

    Attributes:
        outside: the score of the experts of other groups.
    """

    outside: ClassVar[float] = -jnp.inf

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.config = config
        self.kernel = Einsum("BTD,DE->BTE", config.sizes, dtype=dtype, keys=keys).kernel
        self.correction = nnx.Param(jnp.zeros(config.sizes["E"], jnp.float32))

    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        config = self.config
        scores_BTE = self.scores(x_BTD)
        wanted_BTE = self.corrected(scores_BTE)
        # Replicated: with sharded scores the compiler needs a dozen exchanges to choose experts.
        scores_BTE, wanted_BTE = placed(scores_BTE, "B T E"), placed(wanted_BTE, "B T E")

        groups = wanted_BTE.reshape(*wanted_BTE.shape[:2], config.n_group, -1)
        best_two = jax.lax.top_k(groups, 2)[0].sum(-1)
        chosen = jax.nn.one_hot(jax.lax.top_k(best_two, config.topk_group)[1], config.n_group).sum(-2) > 0
        wanted_BTE = jnp.where(chosen[..., None], groups, self.outside).reshape(wanted_BTE.shape)

        ids_BTX = jax.lax.top_k(wanted_BTE, config.num_experts_per_tok)[1]
        weights_BTX = jnp.take_along_axis(scores_BTE, ids_BTX, axis=-1)
        if config.norm_topk_prob:
            weights_BTX /= weights_BTX.sum(-1, keepdims=True) + 1e-20
        return ids_BTX, weights_BTX * config.routed_scaling_factor

    def scores(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the scores [B, T, E] of all experts, in float32."""
        return nnx.sigmoid(self.logits(x_BTD))

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the products [B, T, E] with the vectors of all experts, in float32."""
        return exact_product("BTD,DE->BTE", x_BTD, self.kernel[...])

    def corrected(self, scores_BTE: jax.Array) -> jax.Array:
        """Returns the scores [B, T, E] by which experts are chosen."""
        return scores_BTE + self.correction[...].astype(jnp.float32)


class MoE(RoutedExperts):
    """The chosen experts and the shared experts, if any, x [B, T, D] to [B, T, D]."""

    router_type: ClassVar[Callable[..., Any]] = Router


class Block(PreNormBlock):
    """One layer: attention, then an MLP or experts, each after a norm, with residual connections."""

    attention_type: ClassVar[Callable[..., Any]] = Attention
    moe_type: ClassVar[Callable[..., Any]] = MoE


class Model(Decoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block = Block
    cached = Latent.empty
    mtp_type = mtp.mtp_module(Block)
