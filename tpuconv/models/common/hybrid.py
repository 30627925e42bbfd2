"""Configs of models in which some layers keep a state instead of keys and values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.kinds import faults_of_kinds
from tpuconv.models.common.rope import Rope

OLDER_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}
"""Entries of `layer_types` in files of older releases of transformers."""


@dataclass(frozen=True, kw_only=True)
class StateConfig(DecoderConfig):
    """A decoder whose layers are of several kinds, which `layer_types` lists.

    Class attributes: `state_kind` is the kind of layers with a state, `other_kinds` are those without, with attention
    first.
    """

    state_kind: ClassVar[str] = "linear_attention"
    other_kinds: ClassVar[tuple[str, ...]] = ("full_attention",)

    layer_types: tuple[str, ...] | None

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `DecoderConfig.in_our_keys`, with newer names of kinds."""
        out, key = super().in_our_keys(raw), cls._key("layer_types")
        if isinstance(kinds := out.get(key), list):
            out[key] = [OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        return out

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        known = (self.state_kind, *self.other_kinds)
        yield from faults_of_kinds(self._key("layer_types"), self.kinds, self.num_hidden_layers, known)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The `layer_types` of all layers; without the key all layers are attention."""
        return self.layer_types or (self.other_kinds[0],) * self.num_hidden_layers

    def layers_of(self, kind: str) -> tuple[int, ...]:
        """Returns the numbers of the layers of a kind."""
        return tuple(layer for layer, other in enumerate(self.kinds) if other == kind)

    @property
    def layer_sets(self) -> dict[str, Sequence[int]]:
        return {
            **super().layer_sets,
            "attention_layers": self.layers_of(self.other_kinds[0]),
            "state_layers": self.layers_of(self.state_kind),
        }


ATTENTION_KEYS = frozenset(
    {"num_attention_heads", "num_key_value_heads", "intermediate_size", "max_position_embeddings"}
)
"""Keys of config.json that describe attention and MLPs."""
ATTENTION_LETTERS = frozenset("NKGHF")
"""The letters of their sizes."""


class StatesAlone:
    """A decoder with a state in every layer, and no attention and no MLP. A family's Config derives from this class and
    from a `StateConfig`, in this order."""

    derived: ClassVar[frozenset[str]] = DecoderConfig.derived | ATTENTION_KEYS | {"head_dim", "layer_types"}
    left_out: ClassVar[frozenset[str]] = ATTENTION_KEYS
    state_kind: ClassVar[str]

    num_hidden_layers: int

    @classmethod
    def read_ropes(cls, raw: Mapping[str, Any], context: int) -> dict[str, Any]:
        """See `DecoderConfig.read_ropes`."""
        return {}

    def contradictions_of_heads(self) -> Iterator[str]:
        """See `DecoderConfig.contradictions_of_heads`."""
        yield from ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """See `StateConfig.kinds`."""
        return (self.state_kind,) * self.num_hidden_layers

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """See `DecoderConfig.ropes`."""
        return (None,) * self.num_hidden_layers

    @property
    def rope_dim(self) -> int:
        """See `DecoderConfig.rope_dim`: the fewest, since nothing is rotated."""
        return 2

    @property
    def unrounded_cache(self) -> str:
        """See `DecoderConfig.unrounded_cache`."""
        return "it holds states, which are always in float32"

    @property
    def sizes(self) -> dict[str, int]:
        """See `DecoderConfig.sizes`."""
        sizes: dict[str, int] = super().sizes  # type: ignore[misc]
        return {letter: size for letter, size in sizes.items() if letter not in ATTENTION_LETTERS}


WITHOUT_ATTENTION: Mapping[str, Any] = {
    "num_attention_heads": 1,
    "intermediate_size": 1,
    "max_position_embeddings": 1 << 20,  # a state has no limit
    "head_dim": None,
    "layer_types": None,
}
"""The fields of `StatesAlone` that no config.json has."""

NO_LIMIT = 3e38
"""Stands for infinity, which is no number in JSON: nearly the largest float32."""


@dataclass(frozen=True, kw_only=True)
class MambaConfig(StateConfig):
    """A decoder with Mamba-2 in some layers. `mamba_d_head` is computed from `mamba_expand` times the model width if it
    is absent or "auto"."""

    mamba_n_heads: int
    mamba_n_groups: int
    mamba_d_state: int
    mamba_d_head: int | None
    mamba_d_conv: int
    mamba_expand: int
    mamba_conv_bias: bool
    mamba_proj_bias: bool
    time_step_limit: tuple[float, ...]

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `StateConfig.in_our_keys`. Limits of time steps may be null or infinite."""
        out, size = super().in_our_keys(raw), cls._key("mamba_d_head")
        if out.get(size) == "auto":
            del out[size]
        if isinstance(limits := out.pop("time_step_limit", None), list):
            limits = [NO_LIMIT if _is_infinite(limit) else limit for limit in limits]
        return out if limits is None else out | {"time_step_limit": limits}

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        heads, groups = self.mamba_n_heads, self.mamba_n_groups
        if heads % groups:
            yield f"{self._key('mamba_n_heads')}={heads} is not a multiple of {self._key('mamba_n_groups')}={groups}"
        if len(self.time_step_limit) != 2 or not 0 <= self.time_step_limit[0] <= self.time_step_limit[1]:
            yield f"time_step_limit={self.time_step_limit} is not a smallest and a largest time step"
        if self.layers_of(self.state_kind) and self.mamba_width != heads * self.mamba_head:
            yield (
                f"{heads} heads of {self.mamba_head} are not mamba_expand={self.mamba_expand} times "
                f"hidden_size={self.hidden_size}"
            )

    @property
    def mamba_width(self) -> int:
        """The width of all heads of Mamba-2 together."""
        return self.mamba_expand * self.hidden_size

    @property
    def mamba_head(self) -> int:
        """The dimension of a head of Mamba-2."""
        return self.mamba_d_head or max(1, self.mamba_width // self.mamba_n_heads)

    @property
    def step_limits(self) -> tuple[float, float]:
        """The smallest and the largest time step."""
        low, high = self.time_step_limit
        return low, high

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "groups": self.mamba_n_groups,
            "per_group": self.mamba_n_heads // self.mamba_n_groups,
            "key_dim": self.mamba_d_state,
            "value_dim": self.mamba_head,
            "taps": self.mamba_d_conv,
        }


@dataclass(frozen=True, kw_only=True)
class ChannelConfig(StateConfig):
    """A decoder with Mamba-1 in some layers. `mamba_dt_rank` is a sixteenth of the model width if it is absent or
    "auto"."""

    mamba_d_state: int
    mamba_d_conv: int
    mamba_expand: int
    mamba_dt_rank: int | None
    mamba_conv_bias: bool
    mamba_proj_bias: bool

    @classmethod
    def in_our_keys(cls, raw: Mapping[str, Any]) -> dict[str, Any]:
        """As `StateConfig.in_our_keys`. The rank of time steps may be "auto"."""
        out, rank = super().in_our_keys(raw), cls._key("mamba_dt_rank")
        if out.get(rank) == "auto":
            del out[rank]
        return out

    @property
    def sizes(self) -> dict[str, int]:
        return {
            **super().sizes,
            "channels": self.mamba_expand * self.hidden_size,
            "key_dim": self.mamba_d_state,
            "step_rank": self.mamba_dt_rank or -(-self.hidden_size // 16),
            "taps": self.mamba_d_conv,
        }


def _is_infinite(limit: Any) -> bool:
    """Returns True if an entry of config.json is infinity, as transformers 5 or others write it, or not a float32."""
    return limit == {"__float__": "Infinity"} or (isinstance(limit, int | float) and limit > NO_LIMIT)
