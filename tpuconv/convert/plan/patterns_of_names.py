"""The tensors of a checkpoint by patterns of names, for a comparison with many families."""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tpuconv.encodings.decode import Tensor
from tpuconv.models.common.wrapper import is_outside
from tpuconv.models.registry import Family
from tpuconv.notation.layout import Shape
from tpuconv.notation.segments import without_front

NAME_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number between dots."""


def pattern_of(name: str) -> str:
    """Returns the pattern of names that differ from this one in numbers only."""
    return NAME_NUMBER.sub("{}", name)


@dataclass(frozen=True)
class NamePatterns:
    """The tensors of a checkpoint by patterns of names.

    Attributes:
        names: of each pattern.
        samples: of each pattern one name for each first number: a model with experts has far more names.
        shapes: of each pattern.
        beside: patterns of tensors that families skip as parts of multimodal models beside the text model.
        wrapping: the segments before the layers.
    """

    names: Mapping[str, Sequence[str]]
    samples: Mapping[str, Sequence[str]]
    shapes: Mapping[str, set[Shape]]
    beside: frozenset[str]
    wrapping: Collection[str]

    @property
    def sampled(self) -> list[str]:
        """All samples."""
        return [name for names in self.samples.values() for name in names]


def patterns_of(tensors: Mapping[str, Tensor], families: Iterable[Family]) -> NamePatterns:
    """Returns the tensors of a checkpoint by patterns of names. `families` are all known ones."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    first: defaultdict[str, dict[str, str]] = defaultdict(dict)
    shapes: defaultdict[str, set[Shape]] = defaultdict(set)
    for name, tensor in tensors.items():
        pattern = pattern_of(name)
        names[pattern].append(name)
        shapes[pattern].add(tensor.shape)
        number = NAME_NUMBER.search(name)
        first[pattern].setdefault(number[0] if number else "", name)
    modules = tuple(f"{module}." for module in _modules_beside(families))
    beside = frozenset(pattern for pattern in names if without_front(pattern).startswith(modules))
    samples = {pattern: list(found.values()) for pattern, found in first.items()}
    return NamePatterns(names, samples, shapes, beside, _wrapping(names.keys() - beside))


def _modules_beside(families: Iterable[Family]) -> set[str]:
    """Returns the modules beside text models that families skip, without those that other families have in theirs."""
    families = list(families)
    skipped = {
        without_front(pattern.removesuffix(".*"))
        for family in families
        for pattern, why in family.table.ignore.items()
        if is_outside(why) and pattern.endswith(".*") and "*" not in pattern[:-2]
    }
    in_texts = {
        without_front(name).partition(".")[0] for each in families for row in each.table for name in row.hf_names
    }
    return skipped - in_texts


def _wrapping(patterns: Iterable[str]) -> list[str]:
    """Returns the segments before most of the patterns that have numbers."""
    counts = Counter(pattern.partition(".{}.")[0] for pattern in sorted(patterns) if ".{}." in pattern)
    return counts.most_common(1)[0][0].split(".")[:-1] if counts else []
