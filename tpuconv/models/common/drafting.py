"""Drafts of any kind: the interface by which `tpuconv.models.drafts` runs them."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from tpuconv.errors import UnsupportedConfig
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.layers import Embed

DRAFTS_AHEAD = 3
"""The number of drafts in a step, of drafts that do not set it."""


class Drafted(NamedTuple):
    """The output of a draft.

    Attributes:
        logits_BTV: of the token after each token, over the vocabulary of the draft, in float32.
        x_BTD: hidden states, which a further call reads.
        kv: cache with these tokens; None without a cache.
    """

    logits_BTV: jax.Array
    x_BTD: jax.Array
    kv: Any = None


class Draft(Protocol):
    """A model that drafts tokens of a target.

    Attributes:
        config: its config, a `DraftConfig`.
        dtype: of its parameters and activations.
        ahead: the number of drafts in a step.
        reads: how often a step reads the weights of the draft.
        looked_up: the module of which a step reads single rows; None if there is none.
    """

    config: Any
    dtype: Any
    ahead: int
    reads: int

    @property
    def looked_up(self) -> Any: ...

    def init_cache(self, batch: int, length: int, dtype: Any) -> Any:
        """Returns an empty cache for `batch` sequences of `length` tokens; None for a draft without a cache."""
        ...

    def propose(
        self,
        target: Decoder,
        states_BTs: jax.Array,
        next_BT: jax.Array,
        column_B: jax.Array,
        cache: Cache,
        slot: jax.Array,
    ) -> tuple[jax.Array, Cache]:
        """Drafts tokens.

        Args:
            target: the target.
            states_BTs: the hidden states that `states_of` names, joined on the last axis.
            next_BT: the token after each token.
            column_B: the last token of each sequence that is kept.
            cache: the cache of the target with the kept tokens; the cache of the draft is its `mtp`.
            slot: the slot of the first token.

        Returns:
            The token after the last one and the drafts [B, 1 + ahead], and the cache.
        """
        ...


class DraftConfig(Protocol):
    """The config of a draft."""

    def states_of(self, layers: int) -> tuple[int, ...]:
        """Returns the layers of a target with this number of layers whose input the draft reads; the number of layers
        stands for the output of the last one.

        Raises:
            UsageError: the target has fewer layers.
        """
        ...

    def sizes_beside(self, target: Any) -> Mapping[str, tuple[int, int]]:
        """Returns sizes in the draft and in the target, which must be equal, by their descriptions.

        Raises:
            UsageError: the draft is for targets of other families.
        """
        ...


def at_column(x_BT: jax.Array, column_B: jax.Array) -> jax.Array:
    """Returns one column of each sequence, as an array whose second axis is 1."""
    columns = column_B.reshape(-1, *[1] * (x_BT.ndim - 1))
    return jnp.take_along_axis(x_BT, columns, axis=1)


def check_unstacked(config: DecoderConfig, scan_layers: bool) -> None:
    """Raises UnsupportedConfig if layers of a draft are to be stacked."""
    if scan_layers:
        raise UnsupportedConfig(
            f"scan_layers is not implemented for {config.model_type}: {config.unscannable}",
            hint="leave scan_layers out",
        )


class SharingDraft(nnx.Module):
    """A draft that may lack an embedding, which is then the target's, and that may have a part of the target's
    vocabulary: `d2t` has the distance from each of its ids to the id of the target, `t2d` says which ids are in the
    part."""

    config: Any
    dtype: Any
    embed: Embed | None

    def add_maps(self, config: Any) -> None:
        """Creates the maps, if the draft has some."""
        if config.has_maps:
            self.d2t = nnx.Param(jnp.zeros(config.sizes["draft_vocab"], jnp.int32))
            self.t2d = nnx.Param(jnp.zeros(config.sizes["V"], bool))

    def embedded(self, ids_BT: jax.Array, given_BTD: jax.Array | None) -> jax.Array:
        """Returns embeddings [B, T, D]: the draft's, else those given, else zeros."""
        if self.embed is not None:
            return self.embed(ids_BT)
        return jnp.zeros((*ids_BT.shape, self.config.sizes["D"]), self.dtype) if given_BTD is None else given_BTD

    def embedded_by(self, target: Decoder, ids_BT: jax.Array) -> jax.Array | None:
        """Returns the embeddings of the target [B, T, D], without its factor; None for a draft that has its own."""
        return target.embed(ids_BT) if self.embed is None else None

    def most_likely(self, logits_BTV: jax.Array) -> jax.Array:
        """Returns the most likely ids [B, T], in the vocabulary of the target."""
        ids_BT = jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32)
        return ids_BT + self.d2t[...].astype(ids_BT.dtype)[ids_BT] if self.config.has_maps else ids_BT

    @property
    def looked_up(self) -> Any:
        """See `Draft`."""
        return self.embed
