"""The configs of models, as tables need them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class HasAxes(Protocol):
    """The interface of a family's config for a table, besides the properties that rows name in `when`, `layer_sizes` if
    layers differ in the size of a letter (`DecoderConfig.layer_sizes`), and `parts` if the model has parts beside its
    text model (`DecoderConfig.parts`)."""

    @property
    def axes(self) -> Mapping[str, int | Sequence[int]]:
        """The size of every letter of the table. For a letter that is an index in names, it may be the list of its
        values."""


@dataclass(frozen=True)
class WithAxes:
    """A config with other axes, of which all other properties stay."""

    config: HasAxes
    axes: Mapping[str, int | Sequence[int]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.config, name)


def configs_by_part(config: HasAxes) -> dict[str, HasAxes]:
    """Returns the config of the text model, under an empty name, and of each part beside it."""
    return {"": config, **getattr(config, "parts", {})}
