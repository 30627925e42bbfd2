"""How a release differs from its family's table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Release:
    """How a release names and groups its tensors, where that differs from its family's table.

    Attributes:
        spelling: beginnings of templates, and what stands in their place on disk (`tpuconv.notation.spelling`).
        apart: templates of modules that have other names in some layers: those names, and the numbers of the layers.
        forms: by `tpuconv.notation.forms.FormPlace.name` the form of all layers, or the layers of each form.
    """

    spelling: Mapping[str, str] = field(default_factory=dict)
    apart: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    forms: Mapping[str, str | Mapping[str, Sequence[int]]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns what a manifest keeps: nothing of a release that has its family's table."""
        return {name: dict(value) for name, value in vars(self).items() if value}


AS_TABLED = Release()
"""A release that its family's table describes."""
