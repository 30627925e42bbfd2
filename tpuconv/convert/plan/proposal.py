"""A start for a family that does not exist yet: the nearest one, what it explains of a checkpoint's headers and
config.json, and a draft of its `family.py`."""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tpuconv.convert.plan.candidate import Candidate, FamilyFit, fit_of, nearest_first
from tpuconv.convert.plan.family_draft import draft
from tpuconv.convert.plan.patterns_of_names import NAME_NUMBER, patterns_of
from tpuconv.encodings.tensors import decode_names
from tpuconv.errors import TpuconvError, UsageError
from tpuconv.jsonfile import short
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.registry import all_families, find_family
from tpuconv.names import collapse
from tpuconv.notation.layout import Shape
from tpuconv.sources.source import Source
from tpuconv.text import OneLine

MOST_CANDIDATES = 5
MOST_NAMED_READERS = 3
COUNTED = ("explained", "renamed", "left", "missing")


@dataclass(frozen=True)
class TensorPattern:
    """Tensors whose names differ in numbers only: the pattern, how many there are, dtype and shape of the first."""

    pattern: str
    count: int
    dtype: str
    shape: Shape


@dataclass(frozen=True, repr=False)
class FamilyProposal(OneLine):
    """The description of a checkpoint that no family reads.

    Attributes:
        source, model_type, architectures: the facts of the checkpoint. Without a model_type it is made of the
            architecture.
        candidates: the nearest families, the nearest first.
        explained, left: tensors that the nearest family explains, and the other tensors.
        unread: keys of config.json that the nearest family refuses or does not read, with their values.
        absent: keys that it reads and config.json does not have, with the family's defaults.
        readers: families that read keys which the nearest one does not, with the value of config.json.
        draft: the text of a `family.py`.
        read_by: the family that reads the checkpoint's model_type, if there is one all the same.
    """

    source: str
    model_type: str
    architectures: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    explained: tuple[TensorPattern, ...]
    left: tuple[TensorPattern, ...]
    unread: Mapping[str, Any]
    absent: Mapping[str, Any]
    readers: Mapping[str, tuple[str, ...]]
    draft: str
    read_by: str | None

    @property
    def nearest(self) -> Candidate:
        """The nearest family."""
        return self.candidates[0]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        patterns = {
            key: [vars(each) | {"shape": list(each.shape)} for each in getattr(self, key)]
            for key in ("explained", "left")
        }
        return {
            "source": self.source,
            "model_type": self.model_type,
            "architectures": list(self.architectures),
            "nearest": self.nearest.name,
            **patterns,
            "missing": list(self.nearest.missing),
            "renamed": dict(self.nearest.renamed),
            "unread": {key: short(value) for key, value in self.unread.items()},
            "absent": {key: short(value) for key, value in self.absent.items()},
            "readers": {key: list(names) for key, names in self.readers.items()},
            "candidates": [
                {"name": each.name, **{key: len(getattr(each, key)) for key in COUNTED}} for each in self.candidates
            ],
            "draft": self.draft,
            "read_by": self.read_by,
        }


def propose_family(source: Source) -> FamilyProposal:
    """Returns the nearest family of a checkpoint, and a draft for a family of its own. The text model of a multimodal
    model is compared with families of text models too.

    Raises:
        UsageError: no family has a config that can be read from this config.json.
        UnsupportedConfig: an encoding that is not implemented.
    """
    tensors, _ = decode_names(source.tensors, source.encoding, any_scales=True)
    families = all_families()
    given = patterns_of(tensors, families)
    found = nearest_first([fit for each in families if (fit := fit_of(each, source.config, given)) is not None])
    if not found:
        raise UsageError(
            f"no family is near {source.name}: none can read its config.json",
            hint="docs/families.md shows how a family is written",
        )
    nearest = found[0]

    def described(chosen: tuple[str, ...]) -> tuple[TensorPattern, ...]:
        names = [name for pattern in chosen for name in given.names[pattern]]
        return tuple(
            TensorPattern(pattern, len(group), tensors[group[0]].values.dtype, tensors[group[0]].shape)
            for pattern, group in collapse(names).items()
        )

    architectures = tuple(map(str, source.config.get("architectures") or ()))
    named = re.sub(r"(For\w+|Model)$", "", next(iter(architectures), "unnamed")).lower()
    read_by = None
    with suppress(TpuconvError):
        read_by = find_family(source.config).name
    return FamilyProposal(
        source=source.name,
        model_type=str(source.config.get("model_type") or named),
        architectures=architectures,
        candidates=tuple(fit.candidate for fit in found[:MOST_CANDIDATES]),
        explained=described(nearest.candidate.explained),
        left=described(nearest.candidate.left),
        unread=nearest.unread,
        absent=nearest.defaults,
        readers={key: _readers(found, key, value) for key, value in nearest.unread.items()},
        draft=draft(nearest, source.config, given.shapes, _layer_fronts(given.names, nearest.config)),
        read_by=read_by,
    )


def _layer_fronts(patterns: Mapping[str, Collection[str]], config: DecoderConfig) -> frozenset[str]:
    """Returns what names have before the numbers of all layers."""
    numbers: dict[str, set[int]] = {}
    for pattern, names in patterns.items():
        if "{}" in pattern:
            found = {int(number[0]) for name in names if (number := NAME_NUMBER.search(name))}
            numbers.setdefault(pattern.partition("{}")[0], set()).update(found)
    layers = set(range(config.num_hidden_layers))
    return frozenset(front for front, found in numbers.items() if "layers." in front or found == layers)


def _readers(fits: Iterable[FamilyFit], key: str, value: Any) -> tuple[str, ...]:
    """Returns the first families that read a key with this value."""
    return tuple(islice((fit.family.name for fit in fits if fit.reads(key, value)), MOST_NAMED_READERS))
