"""Qwen4-Exp, the text model: gated residual streams, embeddings of n-grams, linear attention, and attention to blocks
of tokens that an indexer selects."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.cache import KV, IndexKeys, append_kv, write_slots
from tpuconv.models.common.delta import DeltaNet, DeltaState
from tpuconv.models.common.layers import (
    CenteredRMSNorm,
    Einsum,
    Keys,
    apply_rope,
    attention,
    mrope_cos_sin,
    rope_cos_sin,
)
from tpuconv.models.common.recurrence import HybridDecoder, LayerState, exact_einsum
from tpuconv.models.common.selection import complete_blocks, in_blocks, tokens_of_best_blocks
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import by_stream, to_streams
from tpuconv.models.modules.experts import SharedAndProbableExperts
from tpuconv.models.qwen3_next import modules as qwen3_next
from tpuconv.models.qwen4_exp_text.family import Config
from tpuconv.models.qwen4_exp_text.ngrams import NGrams, NGramState, StreamNorm
from tpuconv.notation.letters import with_letters

LEGEND = {"q": "index_heads", "x": "index_dim", "e": "streams", "u": "streams_out", "d": "stream_rank"}
"""The words of this module, by the letters of its einsums and arrays."""


class Mixer(nnx.Module):
    """The gated mean of the residual streams, x [B, T, (e D)] to [B, T, D]. Each element of each stream has a gate; the
    gates are made of all streams."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        self.count, sizes = config.hc_count, with_letters(config.sizes, LEGEND)
        self.norm = StreamNorm(config, dtype=dtype)
        self.down = Einsum("BTeD,eDd->BTd", sizes, dtype=dtype, keys=keys)
        self.up = Einsum("BTd,deD->BTeD", sizes, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return self.mixed(self.norm(by_stream(x_BTD, self.count)))

    def mixed(self, x_BTeD: jax.Array) -> jax.Array:
        """Returns the gated mean [B, T, D] of normalized streams."""
        gate_BTeD = nnx.sigmoid(self.up(nnx.silu(self.down(x_BTeD) / self.count)))
        return (gate_BTeD * x_BTeD).mean(axis=2)


class GatedResiduals(Mixer):
    """Computes the input of a part of a layer from the residual streams, as `Mixer`, and the weights of its output for
    each stream."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        sizes = with_letters(config.sizes, LEGEND)
        self.inject = Einsum("BTeD,eDu->BTu", sizes, dtype=dtype, keys=keys)

    def read(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the input [B, T, D] of the part, and the weights [B, T, e] of its output in each stream."""
        x_BTeD = self.norm(by_stream(x_BTD, self.count))
        return self.mixed(x_BTeD), 2 * nnx.sigmoid(self.inject(x_BTeD) / self.count)


def written(x_BTD: jax.Array, y_BTD: jax.Array, weights_BTe: jax.Array) -> jax.Array:
    """Returns the streams [B, T, (e D)] with the output of a part."""
    return x_BTD + (y_BTD[:, :, None] * weights_BTe[..., None]).reshape(x_BTD.shape)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PlacedKeys(IndexKeys):
    """The keys of an indexer, and the rotary positions of their tokens by time, row and column, in a model that sees.
    In others the positions are the numbers of the tokens."""

    axes: ClassVar[tuple[str, ...]] = (*IndexKeys.axes, "B S 1")

    at_BS3: jax.Array | None = None

    @classmethod
    def empty(cls, config: Any, shape: tuple[int, ...], dtype: DTypeLike) -> Self:
        keys = super().empty(config, shape, dtype)
        return replace(keys, at_BS3=jnp.zeros((*shape, 3), jnp.int32)) if config.towers else keys

    @staticmethod
    def places(config: Any, step: Step) -> jax.Array | None:
        """Returns the rotary positions [B, T, 3] of the tokens of a step; None in a model that does not see."""
        if not config.towers or step.at is None:
            return None
        return jnp.moveaxis(jnp.broadcast_to(step.at, (3, *step.pos_BT.shape)), 0, -1)


class MeanBlockIndexer(nnx.Module):
    """Selects for each token the blocks of `indexer_compress_ratio` tokens with the highest scores, `indexer_budget`
    tokens in all, and its own block while that is incomplete. A block's key is the mean of the keys of its tokens, at
    the position of the first one; its score is the sum over the heads of the products of queries and key, negative ones
    as 0. Scores are computed in float32: a small error may select another block."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes, self.config = with_letters(config.sizes, LEGEND), config
        self.q = Einsum("BTD,Dqx->BTqx", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dx->BTx", sizes, dtype=dtype, keys=keys)
        self.q_norm = CenteredRMSNorm("x", sizes, config.rms_norm_eps, dtype=dtype)
        self.k_norm = CenteredRMSNorm("x", sizes, config.rms_norm_eps, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, index: PlacedKeys, step: Step, visible_BTS: jax.Array) -> jax.Array:
        """Returns the mask [B, T, S] of the selected tokens among the visible ones.

        Args:
            x_BTD: hidden states.
            index: the cache with these tokens.
            step: positions.
            visible_BTS: the mask of the tokens that each token sees.
        """
        config, rate = self.config, self.config.indexer_compress_ratio
        # Computed where it is not needed too, since a quantization finds kernels by their products.
        q_BTqx = apply_rope(self.q_norm(self.q(x_BTD)), step.cos_sin_in(x_BTD.dtype)).astype(jnp.float32)
        chosen, blocks = config.indexer_budget // rate, visible_BTS.shape[-1] // rate
        if blocks <= chosen:
            return visible_BTS
        k_BPx = self.block_keys(index, step, blocks, rate).astype(jnp.float32)
        scores_BTP = nnx.relu(exact_einsum("BTqx,BPx->BTqP", q_BTqx, k_BPx)).sum(axis=2)
        return tokens_of_best_blocks(scores_BTP, chosen, rate, complete_blocks(step, rate), step, visible_BTS)

    def block_keys(self, index: PlacedKeys, step: Step, blocks: int, rate: int) -> jax.Array:
        """Returns the keys [B, P, x] of the blocks, made of the keys of all tokens in the order of their positions."""
        k_BSx = index.i_BSx
        k_BPcx = in_blocks(k_BSx, step, blocks, rate)
        k_BPx = self.k_norm(k_BPcx.astype(jnp.float32).mean(axis=2).astype(k_BSx.dtype))
        first_1P = jnp.arange(0, blocks * rate, rate)[None]
        if index.at_BS3 is None:
            cos, sin = rope_cos_sin(self.config.rope, self.config.rope_dim, first_1P)
        else:
            at_BP3 = in_blocks(index.at_BS3, step, blocks, rate)[:, :, 0]
            at_3BP = jnp.moveaxis(at_BP3, -1, 0)
            cos, sin = mrope_cos_sin(self.config.rope, self.config.rope_dim, at_3BP, self.config.mrope)
        return apply_rope(k_BPx[:, :, None], (cos.astype(k_BSx.dtype), sin.astype(k_BSx.dtype)))[:, :, 0]


class Attention(qwen3_next.Attention):
    """Qwen3-Next's attention to the blocks of tokens that an indexer selects."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.indexer = MeanBlockIndexer(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        kv, index = (None, None) if kv is None else kv
        q_BTNH, k_BTKH = self.positioned(self.q(x_BTD), self.k(x_BTD), step)
        kv = append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)
        new = PlacedKeys(self.indexer.k(x_BTD), PlacedKeys.places(self.indexer.config, step))
        index = new if index is None else write_slots(index, new, step.slot)
        y_BTNH = attention(q_BTNH, kv, self.indexer(x_BTD, index, step, step.visible(window)))
        return self.o(self.gated(x_BTD, y_BTNH)), (kv, index)


class GatedDeltaNet(DeltaNet):
    """Linear attention, x [B, T, D] to [B, T, D], with the gate that `output_gate_type` names."""

    config: Config

    def gates(self, x_BTD: jax.Array) -> jax.Array:
        if self.config.output_gate_type == "sigmoid":
            return nnx.sigmoid(self.z(x_BTD).astype(jnp.float32))
        return super().gates(x_BTD)


class Block(nnx.Module):
    """One layer, from residual streams to residual streams: embeddings of n-grams in some, then linear or full
    attention, then experts. A layer with n-grams returns their state beside its own."""

    moe_type: ClassVar[Any] = SharedAndProbableExperts

    def __init__(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys):
        if layer in config.ngram_layers:
            self.ngrams = NGrams(config, layer, dtype=dtype, keys=keys)
        self.attn_streams = GatedResiduals(config, dtype=dtype, keys=keys)
        kind: Any = GatedDeltaNet if layer in config.layer_sets["state_layers"] else Attention
        self.attn = kind(config, dtype=dtype, keys=keys)
        self.moe_streams = GatedResiduals(config, dtype=dtype, keys=keys)
        self.moe = self.moe_type(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        if not hasattr(self, "ngrams"):
            return self.parts(x_BTD, step, window, kv)
        kv, ngrams = (None, None) if kv is None else kv
        y_BTD, ngrams = self.ngrams(x_BTD, step, ngrams)
        x_BTD, kv = self.parts(x_BTD + y_BTD, step, window, kv)
        return x_BTD, (kv, ngrams)

    def parts(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any | None) -> tuple[jax.Array, Any]:
        """Runs attention and experts."""
        y_BTD, weights_BTe = self.attn_streams.read(x_BTD)
        y_BTD, kv = self.attn(y_BTD, step, window, kv)
        x_BTD = written(x_BTD, y_BTD, weights_BTe)
        y_BTD, weights_BTe = self.moe_streams.read(x_BTD)
        return written(x_BTD, self.moe(y_BTD), weights_BTe), kv


class Model(HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    state_type = LayerState
    config: Config

    def __init__(
        self, config: Config, *, dtype: DTypeLike = jnp.bfloat16, rngs: nnx.Rngs | None = None, **options: Any
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, **options)
        self.norm = Mixer(config, dtype=dtype, keys=Keys((rngs or nnx.Rngs(1)).params()))

    def positioned(self, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Returns the streams [B, T, (e D)] of the first layer, which are copies of its input."""
        return to_streams(x_BTD, self.config.hc_count)

    def layer_inputs(self, ids_BT: jax.Array, x_BTD: jax.Array) -> Sequence[Any] | None:
        """Returns the token ids, for each layer, if some have embeddings of n-grams."""
        return [ids_BT] * self.config.num_hidden_layers if self.config.ngram_layers else None

    def cached(self, config: Config, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S], or [L, B, S] for all layers."""
        if layer not in config.layer_sets["state_layers"]:
            index = PlacedKeys.empty(config, shape, self.embed.embedding.dtype)
            return KV.empty(config, layer, shape, dtype), index
        state = DeltaState.empty(config, *shape[:-1])
        return (state, NGramState.empty(config, *shape[:-1])) if layer in config.ngram_layers else state
