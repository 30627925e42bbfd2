"""DFlash (arXiv:2602.06036): modules of a draft model."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import NormedAttention, PreNormBlock
from tpuconv.models.common.cache import KV, Cache, append_kv
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.drafting import Kept, SharingDraft
from tpuconv.models.common.layers import Einsum, Embed, Keys, RMSNorm, apply_rope, rope_cos_sin, times
from tpuconv.models.common.steps import NO_WINDOW, Step
from tpuconv.models.dflash.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"s": "target_states"}


class Attention(NormedAttention):
    """Attention of the tokens of a block to hidden states of the target and to each other, x [B, T, D] to [B, T, D]."""

    def remembered(self, x_BTD: jax.Array, step: Step, kv: KV) -> KV:
        """Returns the cache with keys and values of hidden states of the target [B, T, D]."""
        k_BTKH = apply_rope(self.k_norm(self.k(x_BTD)), step.cos_sin_in(x_BTD.dtype))
        return append_kv(kv, k_BTKH, self.values(x_BTD), step.slot)


class Block(PreNormBlock):
    """One layer: attention and MLP, each after a norm, with residual connections."""

    def new_attention(self, config: Any, layer: int, *, dtype: DTypeLike, keys: Keys) -> Attention:
        bias = config.attention_bias
        return Attention(config, bias=bias, out_bias=bias, dtype=dtype, keys=keys)


class Model(SharingDraft):
    """A draft: a block of tokens, and hidden states of the target before it, to hidden states of the block."""

    def build(self, config: Config, *, dtype: DTypeLike, keys: Keys) -> None:
        sizes = with_letters(config.sizes, LEGEND)
        self.ahead, self.reads = config.drafts, 1
        self.embed = Embed(sizes, dtype=dtype, keys=keys) if config.has_embedding else None
        self.fc = Einsum("BTs,sD->BTD", sizes, dtype=dtype, keys=keys)
        self.hidden_norm = RMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)
        self.layers = nnx.List([Block(config, i, dtype=dtype, keys=keys) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)
        head = sizes | {"V": sizes["draft_vocab"]}
        self.lm_head = Einsum("BTD,DV->BTV", head, dtype=dtype, keys=keys) if config.has_head else None
        self.add_maps(config)

    def __call__(
        self,
        ids_BT: jax.Array,
        states_BCs: jax.Array | None = None,
        *,
        embedded_BTD: jax.Array | None = None,
        pos_BC: jax.Array | None = None,
        pos_BT: jax.Array | None = None,
        pos_BS: jax.Array | None = None,
        slot: jax.Array | int = 0,
        behind: jax.Array | int = 0,
        kvs: tuple[KV, ...] | None = None,
    ) -> tuple[jax.Array, tuple[KV, ...]]:
        """Runs the draft. Without a cache the block of T tokens is behind C tokens with hidden states.

        Args:
            ids_BT: the tokens of the block: the last one, and the mask for each token to predict.
            states_BCs: the hidden states of C tokens in the target, joined on the last axis; None for zeros of T
                tokens, which show the shapes.
            embedded_BTD: embeddings of the block, if the draft has no embedding; None for zeros.
            pos_BC, pos_BT: positions of both, -1 for padding; None without a cache.
            pos_BS: positions of the slots of the cache.
            slot, behind: the slots of the first of the C tokens, and of the first token of the block.
            kvs: the caches of the layers.

        Returns:
            Hidden states [B, T, D] of the block after the last norm, and the caches.
        """
        sizes, (B, T) = self.config.sizes, ids_BT.shape
        embedded_BTD = self.embedded(ids_BT, embedded_BTD)
        if states_BCs is None:
            states_BCs = jnp.zeros((B, T, sizes["target_states"]), self.dtype)
        if kvs is None or pos_BC is None or pos_BT is None or pos_BS is None:
            behind = states_BCs.shape[1]
            kvs = self.init_cache(B, behind + T, states_BCs.dtype)
            pos_BS = jnp.broadcast_to(jnp.arange(behind + T, dtype=jnp.int32), (B, behind + T))
            pos_BC, pos_BT = pos_BS[:, :behind], pos_BS[:, behind:]
        pos_BS = jax.lax.dynamic_update_slice_in_dim(pos_BS, pos_BT, behind, 1)
        rotations = [
            rope_cos_sin(self.config.rope, self.config.rope_dim, pos, pos_BS.shape[1]) for pos in (pos_BC, pos_BT)
        ]
        before = Step(pos_BC, pos_BS, slot, rotations[0])
        c_BCD = self.hidden_norm(self.fc(states_BCs))
        x_BTD = times(embedded_BTD, self.config.input_embedding_scale)
        layers = zip(self.layers, self.config.windows, self.config.both_ways, kvs, strict=True)
        new_kvs = []
        for block, window, both_ways, kv in layers:
            step = Step(pos_BT, pos_BS, behind, rotations[1], both_ways=both_ways)
            known = block.attn.remembered(c_BCD, before, kv)
            x_BTD, known = block(x_BTD, step, NO_WINDOW if window is None else min(window, NO_WINDOW), known)
            new_kvs.append(known)
        return self.norm(x_BTD), tuple(new_kvs)

    def propose(self, target: Decoder, kept: Kept, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `tpuconv.models.common.drafting.Draft`. The block is in slots behind the tokens, which the next step
        writes again."""
        pos_BC, last_B1 = kept.positions(cache), kept.last(kept.next_BT)
        masks_BI = jnp.full((len(last_B1), self.config.block_size - 1), self.config.mask_token_id, last_B1.dtype)
        ids_BI = jnp.concatenate([last_B1, masks_BI], axis=1)
        y_BID, kvs = self(
            ids_BI,
            kept.states_BTs,
            embedded_BTD=self.embedded_by(target, ids_BI),
            pos_BC=pos_BC,
            pos_BT=kept.last(pos_BC) + 1 + jnp.arange(self.config.block_size, dtype=jnp.int32),
            pos_BS=cache.positions_BS,
            slot=kept.slot,
            behind=cache.used,
            kvs=cache.mtp,
        )
        return jnp.concatenate([last_B1, self.drafted(target, y_BID, last_B1)], axis=1), replace(cache, mtp=kvs)

    def drafted(self, target: Decoder, y_BID: jax.Array, last_B1: jax.Array) -> jax.Array:
        """Returns the drafts behind the last token, of the hidden states of a block after the last norm."""
        return self.most_likely(self.logits_of(target, y_BID[:, -self.ahead :]))

    def logits_of(self, target: Decoder, y_BID: jax.Array) -> jax.Array:
        """Returns the logits of hidden states after the last norm, over the vocabulary of the draft."""
        return target.head(y_BID) if self.lm_head is None else self.lm_head(y_BID)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> tuple[KV, ...]:
        """Returns empty caches of the layers, for `batch` sequences of `length` tokens."""
        layers = range(self.config.num_hidden_layers)
        return tuple(KV.empty(self.config, layer, (batch, length), dtype) for layer in layers)
