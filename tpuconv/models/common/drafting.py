"""Drafts of any kind: the interface by which `tpuconv.models.drafts` runs them."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.common.cache import Cache
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.heads import DRAFTS_AHEAD
from tpuconv.models.common.layers import Embed, Keys


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


def at_column(x_BT: jax.Array, column_B: jax.Array) -> jax.Array:
    """Returns one column of each sequence, as an array whose second axis is 1."""
    columns = column_B.reshape(-1, *[1] * (x_BT.ndim - 1))
    return jnp.take_along_axis(x_BT, columns, axis=1)


class Kept(NamedTuple):
    """The tokens of a step that are kept, behind which a draft goes on.

    Attributes:
        states_BTs: the hidden states that `states_of` names, joined on the last axis.
        next_BT: the token after each token.
        column_B: the last token of each sequence that is kept.
        slot: the slot of the first token.
    """

    states_BTs: jax.Array
    next_BT: jax.Array
    column_B: jax.Array
    slot: jax.Array

    def positions(self, cache: Cache) -> jax.Array:
        """Returns the positions [B, T] of the tokens."""
        return jax.lax.dynamic_slice_in_dim(cache.positions_BS, self.slot, self.next_BT.shape[1], 1)

    def last(self, x_BT: jax.Array) -> jax.Array:
        """Returns the column of the last token of each sequence, as `at_column`."""
        return at_column(x_BT, self.column_B)


class Draft(nnx.Module):
    """A model that drafts tokens of a target.

    Args:
        config: the config of the draft, a `DraftConfig`.
        scan_layers: False: layers of a draft are not stacked.
        dtype: of parameters and activations.
        rngs: random keys for the initial weights.

    Attributes:
        ahead: the number of drafts in a step.
        reads: how often a step reads the weights of the draft.

    Raises:
        UnsupportedConfig: `scan_layers` is asked for.
    """

    ahead: int = DRAFTS_AHEAD
    reads: int = DRAFTS_AHEAD

    def __init__(
        self,
        config: Any,
        *,
        scan_layers: bool = False,
        dtype: DTypeLike = jnp.bfloat16,
        rngs: nnx.Rngs | None = None,
    ):
        if scan_layers:
            raise UnsupportedConfig(
                f"scan_layers is not implemented for {config.model_type}: {config.unscannable}",
                hint="leave scan_layers out",
            )
        self.config, self.dtype = config, dtype
        self.build(config, dtype=dtype, keys=Keys((rngs or nnx.Rngs(0)).params()))

    def build(self, config: Any, *, dtype: DTypeLike, keys: Keys) -> None:
        """Creates the modules."""
        raise NotImplementedError

    @property
    def looked_up(self) -> Any:
        """The module of which a step reads single rows; None if there is none."""
        raise NotImplementedError

    def check_tokens(self, target: Any) -> None:
        """Checks the tokens that the weights name: the target would read an id outside its vocabulary as NaN.

        Args:
            target: the config of the target.

        Raises:
            UsageError: the target does not have one of them.
        """

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any:
        """Returns an empty cache for `batch` sequences of `length` tokens; None for a draft without a cache."""
        raise NotImplementedError

    def propose(self, target: Decoder, kept: Kept, cache: Cache) -> tuple[jax.Array, Cache]:
        """Drafts tokens.

        Args:
            target: the target.
            kept: the tokens that are kept.
            cache: the cache of the target with these tokens; the cache of the draft is its `mtp`.

        Returns:
            The token after the last one and the drafts [B, 1 + ahead], and the cache.
        """
        raise NotImplementedError


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


class SharingDraft(Draft):
    """A draft that may lack an embedding, which is then the target's, and that may have a part of the target's
    vocabulary: `d2t` has the distance from each of its ids to the id of the target, `t2d` says which ids are in the
    part."""

    embed: Embed | None

    def add_maps(self, config: Any) -> None:
        """Creates the maps, if the draft has some."""
        if config.has_maps:
            self.d2t = nnx.Variable(jnp.zeros(config.sizes["draft_vocab"], jnp.int32))
            self.t2d = nnx.Param(jnp.zeros(config.sizes["V"], bool))

    def check_tokens(self, target: Any) -> None:
        if not self.config.has_maps:
            return
        distances = self.d2t[...]
        ids = distances + jnp.arange(len(distances), dtype=distances.dtype)
        is_wrong = (ids < 0) | (ids >= target.vocab_size)
        if is_wrong.any():
            first = int(is_wrong.argmax())
            raise UsageError(
                "the draft is damaged: its map `d2t` leads to tokens that the target does not have",
                details=[f"d2t[{first}] is {distances[first]}: the token {ids[first]} of {target.vocab_size}"],
                hint="download the draft again, or generate without it, for the same text",
            )

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
        return self.embed
