"""Greedy generation with a draft: another model, which reads hidden states of its target, or its keys and values."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.drafting import Draft, Kept
from tpuconv.models.common.pairing import check_pair
from tpuconv.models.common.steps import Entered
from tpuconv.models.denoise import Denoiser, Denoising, writes_canvases
from tpuconv.models.generate import Generator, Sampling
from tpuconv.models.speculate import Speculator, check_greedy


class WithDraft(nnx.Module):
    """A target and its draft. The cache of the draft is `mtp` of the target's cache."""

    def __init__(self, target: Decoder, draft: Any):
        self.target, self.draft = target, draft

    def init_cache(self, batch: int, length: int, dtype: DTypeLike | None = None) -> Cache:
        """Returns an empty cache; see `Decoder.init_cache`."""
        cache = self.target.init_cache(batch, length, dtype)
        return replace(cache, mtp=self.draft.init_cache(batch, length, self.draft.dtype if dtype is None else dtype))


class DraftSpeculator(Speculator):
    """A `Speculator` that drafts with another model.

    Args:
        model: the target, from `tpuconv.load`.
        draft: the draft, from `tpuconv.load`, in the same dtype.
        sampling: only without a temperature.
        cache_dtype: of keys and values; None for the model's dtype.

    Raises:
        UsageError: the sampling has a temperature, or the draft is for another model or damaged.
        UnsupportedConfig: rotary positions depend on the length of the cache, the layers of the target are stacked, or
            it has several residual streams.
    """

    def __init__(
        self,
        model: Decoder,
        draft: Any,
        sampling: Sampling = Sampling(),  # noqa: B008  (frozen)
        cache_dtype: DTypeLike | None = None,
    ):
        check_greedy(sampling)
        check_pair(model.config, draft.config, stacked=model.scan_layers)
        draft.check_tokens(model.config)
        self.ahead = draft.ahead
        self.states = draft.config.states_of(model.config.num_hidden_layers)
        self._begin(WithDraft(model, draft), (*model.config.ropes, *draft.config.ropes), sampling, cache_dtype)

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
        draft: Draft = merged.draft
        return draft.propose(merged.target, Kept(states, next_BT, column_B, slot), cache)


def generator_of(
    model: Decoder,
    sampling: Sampling | Denoising = Sampling(),  # noqa: B008  (frozen)
    cache_dtype: DTypeLike | None = None,
    *,
    speculate: bool = False,
    draft: Any = None,
) -> Generator:
    """Returns a generator with a model, which drafts tokens by a draft, if there is one, or with `speculate` by the
    model's module for multi-token prediction, or denoises canvases, if the model writes these. Arguments and errors are
    as of `DraftSpeculator`, `Speculator` and `Denoiser`."""
    if writes_canvases(model.config):
        return Denoiser(model, sampling, cache_dtype)
    if isinstance(sampling, Denoising):
        raise UsageError("this model writes no canvases", hint="give a `Sampling`")
    if draft is not None:
        return DraftSpeculator(model, draft, sampling, cache_dtype)
    return (Speculator if speculate else Generator)(model, sampling, cache_dtype)
