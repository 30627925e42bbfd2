"""Configs of models in which some layers keep a state instead of keys and values."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.kinds import faults_of_kinds

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
        yield from faults_of_kinds("layer_types", self.kinds, self.num_hidden_layers, known)

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


def _is_infinite(limit: Any) -> bool:
    """Returns True if an entry of config.json is infinity, as transformers 5 or others write it, or not a float32."""
    return limit == {"__float__": "Infinity"} or (isinstance(limit, int | float) and limit > NO_LIMIT)
