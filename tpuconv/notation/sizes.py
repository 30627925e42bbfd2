"""Sizes and sets of layers: what a table needs of a family's config."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from tpuconv.notation.letters import sharded_as

MTP = "U"
"""The letter of layers that predict further tokens (MTP)."""
LAYER_NAME = re.compile(r"(?:\w+\.)?layers\.(\d+)\.")
"""How the names of a layer's parameters begin, where layers are not stacked."""


class HasSizes(Protocol):
    """The interface of a family's config for a table, besides the properties that rows name in `when`; `layer_sizes`
    and `module_sizes` if layers, or modules outside of layers, differ in the size of a letter (`DecoderConfig`); and
    `parts` if the model has parts beside its text model (`DecoderConfig.parts`)."""

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


def special_sizes_of(config: HasSizes) -> Callable[[str], Mapping[str, int]]:
    """Returns a function of a parameter's name, which returns the sizes that differ from `sizes` in its layer or its
    module. Trees of targets may have another name in front, and further ones behind."""
    of_layers: Mapping[int, Mapping[str, int]] = getattr(config, "layer_sizes", {})
    of_modules: Mapping[str, Mapping[str, int]] = getattr(config, "module_sizes", {})

    def special(name: str) -> Mapping[str, int]:
        if of_layers and (layer := LAYER_NAME.match(name)):
            return of_layers.get(int(layer[1]), {})
        if not of_modules:
            return {}
        parts = name.split(".")
        modules = (".".join(parts[first:end]) for first in (0, 1) for end in range(first + 1, len(parts)))
        return next((of_modules[module] for module in modules if module in of_modules), {})

    return special


def holds(condition: str | bool | None, config: Any) -> bool:
    """Returns True if a condition of a row or a part of a model holds for a config: properties of the config joined by
    "and", some of them after "not". None always holds."""
    if not isinstance(condition, str):
        return condition is not False
    terms = condition.split(" and ")
    return all(bool(attrgetter(x.removeprefix("not "))(config)) != x.startswith("not ") for x in terms)
