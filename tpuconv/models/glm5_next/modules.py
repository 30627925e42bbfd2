"""GLM-5.3-Flash: Kimi delta attention (arXiv:2510.26692) and, without rotary positions, latent attention to pools of
tokens that an indexer selects, experts as DeepSeek V3's, and several residual streams (arXiv:2512.24880)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import ClampedMLP
from tpuconv.models.common.kda import KDAState, KimiDelta
from tpuconv.models.common.layers import Einsum, Keys, LayerNorm, RMSNorm
from tpuconv.models.common.recurrence import HybridDecoder, exact_einsum
from tpuconv.models.common.selection import PoolKeys, complete_blocks, pooled, tokens_of_best_blocks
from tpuconv.models.common.steps import Step
from tpuconv.models.common.streams import StreamMeanNorm, StreamsBlock, StreamsDecoder
from tpuconv.models.deepseek_v3 import modules as deepseek_v3
from tpuconv.models.deepseek_v3.modules import PlainLatent
from tpuconv.models.deepseek_v32.modules import INDEXER_EPS
from tpuconv.models.glm5_next.family import Config
from tpuconv.models.glm_moe_dsa import modules as glm_moe_dsa
from tpuconv.models.hy_v4 import modules as hy_v4
from tpuconv.notation.letters import with_letters

LEGEND = {"q": "index_heads", "x": "index_dim", "p": "pool_tokens"}
"""The words of this module, by the letters of its einsums and arrays."""


class PoolIndexer(nnx.Module):
    """Selects for each token the pools of `index_kpool` tokens with the highest scores, `index_topk` tokens in all, and
    its own pool while that is incomplete. A pool's key is the weighted sum of the keys of its tokens, with weights for
    each element; its score is as in DeepSeek V3.2 (arXiv:2512.02556, section 2.1). Scores are computed in float32: a
    small error may select another pool."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        sizes = with_letters(config.sizes, LEGEND)
        self.size, self.count = config.index_kpool, config.index_topk // config.index_kpool
        self.scale = (sizes["q"] * sizes["x"]) ** -0.5
        self.q = Einsum("BTQ,Qqx->BTqx", sizes, dtype=dtype, keys=keys)
        self.k = Einsum("BTD,Dx->BTx", sizes, dtype=dtype, keys=keys)
        self.k_norm = LayerNorm("x", sizes, INDEXER_EPS, dtype=dtype)
        self.router = Einsum("BTD,Dq->BTq", sizes, dtype=dtype, keys=keys)
        self.router_gate = Einsum("BTD,Dx->BTx", sizes, dtype=dtype, keys=keys)  # named as what stays unquantized
        self.bias = nnx.Param(jnp.zeros((sizes["p"], sizes["x"]), dtype))

    def kept(self, x_BTD: jax.Array) -> PoolKeys:
        """Returns what the cache holds of these tokens."""
        return PoolKeys(self.k_norm(self.k(x_BTD)), self.router_gate(x_BTD))

    def __call__(
        self, x_BTD: jax.Array, x_BTQ: jax.Array, index: PoolKeys, step: Step, visible_BTS: jax.Array
    ) -> jax.Array:
        """Returns the mask [B, T, S] of the selected tokens among the visible ones.

        Args:
            x_BTD: hidden states.
            x_BTQ: what queries are computed from.
            index: the cache with these tokens.
            step: positions.
            visible_BTS: the mask of the tokens that each token sees.
        """
        # Computed where they are not needed too, since a quantization finds kernels by their products.
        q_BTqx, weights_BTq = self.q(x_BTQ).astype(jnp.float32), self.router(x_BTD).astype(jnp.float32) * self.scale
        pools = visible_BTS.shape[-1] // self.size
        if pools <= self.count:
            return visible_BTS
        k_BPx = pooled(index.i_BSx, index.gate_BSx, step, pools, self.size, self.bias[...]).astype(jnp.float32)
        products_BTqP = nnx.relu(exact_einsum("BTqx,BPx->BTqP", q_BTqx, k_BPx))
        scores_BTP = exact_einsum("BTq,BTqP->BTP", weights_BTq, products_BTqP)
        before_BT1 = complete_blocks(step, self.size)
        return tokens_of_best_blocks(scores_BTP, self.count, self.size, before_BT1, step, visible_BTS)


class Attention(deepseek_v3.Attention):
    """DeepSeek V3's attention without rotary positions."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        del self.q_rope, self.k_rope
        self.q_a_norm = RMSNorm("Q", config.sizes, config.rms_norm_eps, dtype=dtype)
        self.kv_a_norm = RMSNorm("C", config.sizes, config.rms_norm_eps, dtype=dtype)

    def queries(self, x_BTQ: jax.Array, step: Step) -> tuple[jax.Array, jax.Array]:
        q_BTNP = self.q_nope(x_BTQ)
        return q_BTNP, q_BTNP[..., :0]

    def latents(self, x_BTD: jax.Array, step: Step) -> PlainLatent:
        return PlainLatent(self.kv_a_norm(self.kv_a(x_BTD)))

    def attend(self, x_BTD: jax.Array, x_BTQ: jax.Array, kv: Any, step: Step, visible_BTS: jax.Array) -> jax.Array:
        return super().attend(x_BTD, x_BTQ, kv.with_keys(), step, visible_BTS)


class PoolSelectingAttention(Attention):
    """The same to the tokens that an indexer selects. Returns beside its caches the selected tokens."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.indexer = PoolIndexer(config, dtype=dtype, keys=keys)

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, kv: Any) -> tuple[jax.Array, Any]:
        kv, index = kv or (None, None)
        x_BTQ = self.query_latents(x_BTD)
        kv = self.appended(kv, self.latents(x_BTD, step), step)
        index = self.appended(index, self.indexer.kept(x_BTD), step)
        selected_BTS = self.indexer(x_BTD, x_BTQ, index, step, step.visible(window))
        return self.attend(x_BTD, x_BTQ, kv, step, selected_BTS), ((kv, index), selected_BTS)


class PoolSharingAttention(Attention, glm_moe_dsa.SharingAttention):
    """The same to the tokens that the layer before selected. Returns the selected tokens too."""


class BoundedDelta(KimiDelta):
    """Kimi delta attention whose decays may have a bound. Returns beside its state that no tokens were selected."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        super().__init__(config, dtype=dtype, keys=keys)
        self.bound = config.linear_lower_bound

    def __call__(self, x_BTD: jax.Array, step: Step, window: jax.Array | int, state: Any) -> tuple[jax.Array, Any]:
        y_BTD, state = super().__call__(x_BTD, step, window, state)
        return y_BTD, (state, None)


class MoE(hy_v4.MoE):
    """The chosen experts and the shared ones, x [B, T, D] to [B, T, D]. All hidden states have a limit."""

    shared_type = ClampedMLP


class Block(StreamsBlock):
    """One layer: linear or latent attention, then an MLP or experts, each after a norm and between the streams. Returns
    beside the cache the mask [B, T, S] of the tokens that it selected."""

    mlp_type = ClampedMLP
    moe_type: ClassVar[Any] = MoE

    def new_attention(self, config: Config, layer: int, *, dtype: DTypeLike, keys: Keys) -> Any:
        latent = PoolSelectingAttention if layer in config.layer_sets["indexer_layers"] else PoolSharingAttention
        kind: Any = BoundedDelta if layer in config.layer_sets["state_layers"] else latent
        return kind(config, dtype=dtype, keys=keys)


class Model(StreamsDecoder, glm_moe_dsa.Model, HybridDecoder):
    """Token ids [B, T] to logits [B, T, V]."""

    block: ClassVar[Any] = Block
    mtp_type: ClassVar[Any] = None
    norm_type = StreamMeanNorm
    state_type = KDAState
    config: Config

    def cached(self, config: Any, layer: int, shape: tuple[int, ...], dtype: DTypeLike) -> Any:
        """Returns the empty cache of a layer; `shape` is [B, S]."""
        if layer in config.layer_sets["state_layers"]:
            return KDAState.empty(config, *shape[:-1])
        latent = PlainLatent.empty(config, shape, dtype)
        if layer not in config.layer_sets["indexer_layers"]:
            return latent
        return latent, PoolKeys.empty(config, shape, self.embed.embedding.dtype)

    def source_of(self, layer: int) -> int | None:
        """Returns the layer before, if a layer attends to the tokens that it selected."""
        return (
            layer - 1
            if layer in self.config.layer_sets["attention_layers"]
            and layer not in self.config.layer_sets["indexer_layers"]
            else None
        )
