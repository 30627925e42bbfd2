"""Sizes and sets of layers: what a table needs of a family's config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from tpuconv.notation.letters import sharded_as

MTP = "U"
"""The letter of layers that predict further tokens (MTP)."""


class HasSizes(Protocol):
    """The interface of a family's config for a table, besides the properties that rows name in `when`, `layer_sizes` if
    layers differ in the size of a letter (`DecoderConfig.layer_sizes`), and `parts` if the model has parts beside its
    text model (`DecoderConfig.parts`)."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """The size of every letter and word of the table, besides the sets of layers."""

    @property
    def layer_sets(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the layers of every letter and word that stands for layers, and of the experts of every word
        that is sharded as they are and does not count them from 0."""


def sets_of_layers(config: HasSizes) -> dict[str, Sequence[int]]:
    """Returns the layers of the model by their letters and words, without the layers for further tokens, which may have
    numbers of their own, and without words that number experts."""
    return {name: layers for name, layers in config.layer_sets.items() if name != MTP and sharded_as(name) != "E"}


@dataclass(frozen=True)
class WithSizes:
    """A config with other sizes and sets of layers, of which all other properties stay."""

    config: HasSizes
    sizes: Mapping[str, int]
    layer_sets: Mapping[str, Sequence[int]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def configs_by_part(config: HasSizes) -> dict[str, HasSizes]:
    """Returns the config of the text model, under an empty name, and of each part beside it."""
    return {"": config, **getattr(config, "parts", {})}


def holds(condition: str | bool | None, config: Any) -> bool:
    """Returns True if a condition of a row or a part of a model holds for a config: properties of the config joined by
    "and", some of them after "not". None always holds."""
    if not isinstance(condition, str):
        return condition is not False
    terms = condition.split(" and ")
    return all(bool(attrgetter(x.removeprefix("not "))(config)) != x.startswith("not ") for x in terms)
