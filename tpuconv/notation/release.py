"""How a release differs from its family's table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tpuconv.notation.segments import undressed

RANK_MARK = ".rank."
"""Stands between the name of a tensor and the number of the rank that has a piece of it."""
IN_PIECES = "pieces"
"""The form of tensors that a release has in pieces."""


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

    def undressed(self) -> "Release":
        """Returns the same without the segments of trainers."""
        spelling = {ours: undressed(theirs) for ours, theirs in self.spelling.items()}
        apart = {
            ours: {undressed(name): layers for name, layers in theirs.items()} for ours, theirs in self.apart.items()
        }
        return replace(self, spelling=spelling, apart=apart)

    def whole(self) -> "Release":
        """Returns the same with tensors as a whole that the release has in pieces: nothing else reads these."""
        forms = {
            place: form
            if isinstance(form, str)
            else {name: layers for name, layers in form.items() if name != IN_PIECES}
            for place, form in self.forms.items()
            if form != IN_PIECES
        }
        return replace(self, forms=forms)


AS_TABLED = Release()
"""A release that its family's table describes."""
