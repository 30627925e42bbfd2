"""Greedy generation with an EAGLE-3 draft (arXiv:2503.01840): a model of one layer that reads hidden states of its
target."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.steps import Entered
from tpuconv.models.eagle3.family import Config
from tpuconv.models.eagle3.modules import Model
from tpuconv.models.generate import Generator, Sampling
from tpuconv.models.speculate import Speculator, check_greedy

DRAFTS_AHEAD = 3
"""The number of drafts in a step."""


def check_pair(target: DecoderConfig, draft: DecoderConfig) -> None:
    """Checks that a draft fits a target.

    Raises:
        UsageError: `draft` is no draft, or its sizes differ from the sizes of the target.
    """
    if not isinstance(draft, Config):
        raise UsageError("this model is no draft of another one", hint="give the checkpoint of an EAGLE-3 draft")
    sizes = {
        "vocabulary": (draft.vocab_size, target.vocab_size),
        "width of the target": (draft.target_hidden_size or draft.hidden_size, target.hidden_size),
    }
    if not draft.has_embedding:
        sizes["width of the embedding, which the draft takes from its target"] = draft.hidden_size, target.hidden_size
    faults = [f"{size}: {a} in the draft, {b} in the target" for size, (a, b) in sizes.items() if a != b]
    if faults:
        raise UsageError("the draft is for another model: its sizes differ from the target's", details=faults)
    draft.states_of(target.num_hidden_layers)


class WithDraft(nnx.Module):
    """A target and its draft. The cache of the draft is `mtp` of the target's cache."""

    def __init__(self, target: Decoder, draft: Model):
        self.target, self.draft = target, draft

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> Cache:
        """Returns an empty cache; see `Decoder.init_cache`."""
        cache = self.target.init_cache(batch, length, dtype)
        return replace(cache, mtp=self.draft.init_cache(batch, length, self.draft.dtype if dtype is None else dtype))


class DraftSpeculator(Speculator):
    """A `Speculator` that drafts with another model.

    The draft runs once for the tokens that a step keeps, on their hidden states in the target, and then on its own
    hidden states, once for each further draft.

    Args:
        model: the target, from `tpuconv.load`.
        draft: the draft, from `tpuconv.load`, in the same dtype.
        sampling: only without a temperature.
        cache_dtype: of keys and values; None for the model's dtype.
        ahead: number of drafts in a step.

    Raises:
        UsageError: the sampling has a temperature, or the draft is for another model.
        UnsupportedConfig: rotary positions depend on the length of the cache, the layers of the target are stacked, or
            it has several residual streams.
    """

    def __init__(
        self,
        model: Decoder,
        draft: Any,
        sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
        cache_dtype: DTypeLike | None = None,
        *,
        ahead: int = DRAFTS_AHEAD,
    ):
        check_greedy(sampling)
        check_pair(model.config, draft.config)
        if model.scan_layers:
            raise UnsupportedConfig(
                "the layers of this model are stacked, and a draft reads what enters some of them",
                hint="convert it without `scan_layers=`",
            )
        self.ahead = ahead
        self.states = draft.config.states_of(model.config.num_hidden_layers)
        self._begin(WithDraft(model, draft), (*model.config.ropes, draft.config.rope), sampling, cache_dtype)

    def _target(self, merged: Any) -> Any:
        return merged.target

    def _read(self, model: Any, ids_BT: jax.Array, mask_BT: Any, cache: Cache) -> tuple[jax.Array, Any, Cache]:
        entered: Entered = dict.fromkeys(self.states)
        x_BTD, after = model.run_layers(ids_BT, mask_BT, cache, entered=entered)
        states = [state for state in entered.values() if state is not None]
        if {state.shape[-1] for state in states} != {model.config.hidden_size}:
            raise UnsupportedConfig(
                f"a draft reads hidden states of the width {model.config.hidden_size}, and layers of "
                f"{model.config.model_type} have several residual streams",
                hint="generate without it, for the same text",
            )
        return x_BTD, jnp.concatenate(states, axis=-1), after

    def _drafted(
        self, merged: Any, states: Any, next_BT: jax.Array, column_B: jax.Array, cache: Cache, slot: jax.Array
    ) -> tuple[jax.Array, Cache]:
        draft: Model = merged.draft

        def embedded(ids_BT: jax.Array) -> jax.Array | None:
            """Returns the embeddings of the target, without its factor, for a draft that has none."""
            return merged.target.embed(ids_BT) if draft.embed is None else None

        B, T = next_BT.shape
        positions_BS = cache.positions_BS
        pos_BT = jax.lax.dynamic_slice(positions_BS, (0, slot), (B, T))
        out = draft(
            next_BT,
            states,
            embedded_BTD=embedded(next_BT),
            pos_BT=pos_BT,
            pos_BS=positions_BS,
            slot=slot,
            kv=cache.mtp,
            column_B=column_B,
        )
        cache = replace(cache, mtp=out.kv)
        pos_B1 = jnp.take_along_axis(pos_BT, column_B[:, None], axis=1)
        ids_BI = [jnp.take_along_axis(next_BT, column_B[:, None], axis=1)]
        # Further drafts are in slots behind the tokens, which the next step writes again.
        for further in range(1, self.ahead):
            ids_BI.append(self._chosen(draft, out.logits_BTV))
            behind = cache.used + further - 1
            pos_B1 = pos_B1 + 1
            positions_BS = jax.lax.dynamic_update_slice(positions_BS, pos_B1, (0, behind))
            out = draft(
                ids_BI[-1],
                x_BTD=out.x_BTD,
                embedded_BTD=embedded(ids_BI[-1]),
                pos_BT=pos_B1,
                pos_BS=positions_BS,
                slot=behind,
                kv=out.kv,
            )
        ids_BI.append(self._chosen(draft, out.logits_BTV))
        return jnp.concatenate(ids_BI, axis=1), replace(cache, mtp=out.kv)

    def _chosen(self, draft: Model, logits_B1V: jax.Array) -> jax.Array:
        """Returns the most likely ids [B, 1], in the vocabulary of the target."""
        return draft.in_target(jnp.argmax(logits_B1V, axis=-1).astype(jnp.int32))


def generator_of(
    model: Decoder,
    sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
    cache_dtype: DTypeLike | None = None,
    *,
    speculate: bool = False,
    draft: Any = None,
) -> Generator:
    """Returns a generator with a model, which drafts tokens by a draft, if there is one, or with `speculate` by the
    model's module for multi-token prediction. Arguments and errors are as of `DraftSpeculator` and `Speculator`."""
    if draft is not None:
        return DraftSpeculator(model, draft, sampling, cache_dtype)
    return (Speculator if speculate else Generator)(model, sampling, cache_dtype)
