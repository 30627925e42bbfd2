"""EAGLE-3 (arXiv:2503.01840): modules of a draft model."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.models.common.blocks import GatedMLP, JoinedAttention
from tpuconv.models.common.cache import KV, Cache
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.drafting import Drafted, Kept, SharingDraft, at_column
from tpuconv.models.common.layers import Einsum, Embed, Keys, RMSNorm, rope_cos_sin
from tpuconv.models.common.steps import NO_WINDOW, Step
from tpuconv.models.eagle3.family import Config
from tpuconv.notation.letters import with_letters

LEGEND = {"s": "target_states"}


class Block(nnx.Module):
    """The layer: attention to embeddings and hidden states, each after a norm, then an MLP."""

    def __init__(self, config: Config, *, dtype: DTypeLike, keys: Keys):
        def norm() -> RMSNorm:
            return RMSNorm("D", config.sizes, config.rms_norm_eps, dtype=dtype)

        self.embed_norm, self.hidden_norm, self.mlp_norm = norm(), norm(), norm()
        self.attn = JoinedAttention(config, bias=config.attention_bias, dtype=dtype, keys=keys)
        self.mlp = GatedMLP(config, bias=config.mlp_bias, dtype=dtype, keys=keys)
        self.norm_before_residual = config.norm_before_residual

    def __call__(self, embedded_BTD: jax.Array, x_BTD: jax.Array, step: Step, kv: KV | None) -> tuple[jax.Array, KV]:
        normed_BTD = self.hidden_norm(x_BTD)
        joined_BTj = jnp.concatenate([self.embed_norm(embedded_BTD), normed_BTD], axis=-1)
        y_BTD, kv = self.attn(joined_BTj, step, NO_WINDOW, kv)
        x_BTD = (normed_BTD if self.norm_before_residual else x_BTD) + y_BTD
        return x_BTD + self.mlp(self.mlp_norm(x_BTD)), kv


class Model(SharingDraft):
    """A draft: ids of tokens, and hidden states of the tokens before them, to the logits of the tokens after them."""

    def build(self, config: Config, *, dtype: DTypeLike, keys: Keys) -> None:
        sizes = with_letters(config.sizes, LEGEND)
        self.embed = Embed(sizes, dtype=dtype, keys=keys) if config.has_embedding else None
        self.input_norm = RMSNorm("s", sizes, config.rms_norm_eps, dtype=dtype) if config.norm_before_fc else None
        self.fc = Einsum("BTs,sD->BTD", sizes, dtype=dtype, keys=keys)
        self.layers = nnx.List([Block(config, dtype=dtype, keys=keys)])
        self.norm = RMSNorm("D", sizes, config.rms_norm_eps, dtype=dtype)
        self.lm_head = Einsum("BTD,DV->BTV", sizes | {"V": sizes["draft_vocab"]}, dtype=dtype, keys=keys)
        self.add_maps(config)

    def __call__(
        self,
        ids_BT: jax.Array,
        states_BTs: jax.Array | None = None,
        *,
        x_BTD: jax.Array | None = None,
        embedded_BTD: jax.Array | None = None,
        pos_BT: jax.Array | None = None,
        pos_BS: jax.Array | None = None,
        slot: jax.Array | int = 0,
        kv: KV | None = None,
        column_B: jax.Array | None = None,
    ) -> Drafted:
        """Runs the draft.

        Args:
            ids_BT: the token after each token.
            states_BTs: the hidden states of the tokens in the target, joined on the last axis; None for zeros, which
                show the shapes.
            x_BTD: in place of these the hidden states of an earlier call.
            embedded_BTD: embeddings of `ids_BT`, if the draft has no embedding; None for zeros.
            pos_BT: positions of the tokens, -1 for padding; None for 0, 1, ...
            pos_BS: positions of the slots of the cache; None without a cache.
            slot: the slot of the first token.
            kv: the cache of earlier tokens.
            column_B: the token of each sequence whose logits and hidden states are returned; None for all.
        """
        sizes, (B, T) = self.config.sizes, ids_BT.shape
        embedded_BTD = self.embedded(ids_BT, embedded_BTD)
        if x_BTD is None:
            given = jnp.zeros((B, T, sizes["target_states"]), self.dtype) if states_BTs is None else states_BTs
            x_BTD = self.fc(given if self.input_norm is None else self.input_norm(given))
        if pos_BT is None:
            pos_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        slots = None if pos_BS is None else pos_BS.shape[1]
        cos_sin = rope_cos_sin(self.config.rope, self.config.rope_dim, pos_BT, slots)
        step = Step(pos_BT, pos_BT if pos_BS is None else pos_BS, slot, cos_sin)
        x_BTD, kv = self.layers[0](embedded_BTD, x_BTD, step, kv)
        if column_B is not None:
            x_BTD = at_column(x_BTD, column_B)
        return Drafted(self.lm_head(self.norm(x_BTD)).astype(jnp.float32), x_BTD, kv)

    def propose(self, target: Decoder, kept: Kept, cache: Cache) -> tuple[jax.Array, Cache]:
        """See `tpuconv.models.common.drafting.Draft`. The draft runs once for the tokens that are kept, on their hidden
        states in the target, and then on its own hidden states, once for each further draft."""
        positions_BS, pos_BT = cache.positions_BS, kept.positions(cache)
        out = self(
            kept.next_BT,
            kept.states_BTs,
            embedded_BTD=self.embedded_by(target, kept.next_BT),
            pos_BT=pos_BT,
            pos_BS=positions_BS,
            slot=kept.slot,
            kv=cache.mtp,
            column_B=kept.column_B,
        )
        cache = replace(cache, mtp=out.kv)
        pos_B1, ids_BI = kept.last(pos_BT), [kept.last(kept.next_BT)]
        # Further drafts are in slots behind the tokens, which the next step writes again.
        for further in range(1, self.ahead):
            ids_BI.append(self.most_likely(out.logits_BTV))
            behind = cache.used + further - 1
            pos_B1 = pos_B1 + 1
            positions_BS = jax.lax.dynamic_update_slice_in_dim(positions_BS, pos_B1, behind, 1)
            out = self(
                ids_BI[-1],
                x_BTD=out.x_BTD,
                embedded_BTD=self.embedded_by(target, ids_BI[-1]),
                pos_BT=pos_B1,
                pos_BS=positions_BS,
                slot=behind,
                kv=out.kv,
            )
        ids_BI.append(self.most_likely(out.logits_BTV))
        return jnp.concatenate(ids_BI, axis=1), replace(cache, mtp=out.kv)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        """Returns an empty cache for `batch` sequences of `length` tokens."""
        return KV.empty(self.config, 0, (batch, length), dtype)
