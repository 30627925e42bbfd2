"""A family beside a checkpoint: what it explains of the tensors and of config.json."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from tpuconv.convert.plan.lenient import FAULTS, lenient_readings, refused_keys, text_of
from tpuconv.convert.plan.patterns_of_names import NamePatterns, pattern_of
from tpuconv.convert.plan.renaming import guessed
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import NO_EFFECT
from tpuconv.models.common.rope import ROPE_KEYS
from tpuconv.models.common.wrapper import WrapperConfig
from tpuconv.models.registry import Family
from tpuconv.notation.layout import Shape
from tpuconv.notation.sizes import WithSizes, sets_of_layers
from tpuconv.notation.table import INDEX, Map
from tpuconv.sources.config import parts_of

MISSING = 4
"""How much worse it is if the checkpoint lacks what a family has than if the family lacks what the checkpoint has: what
is left may be added to a family, what is missing must be taken out. A value that the family refuses counts as much."""

LEAST_LIKENESS = 0.25
"""The least likeness by names that tells the nearest family. Below it shapes and words do."""

ANOTHER_KIND = 0.1
"""The part of the likeness that a family of text models loses beside a multimodal checkpoint, and the reverse."""

AS_LIKE = 0.09
"""The largest difference of likeness at which families are equally like: the one with the fewest tensors that the
checkpoint lacks and keys that it refuses is the nearest."""


@dataclass(frozen=True)
class Candidate:
    """A family, and how well it fits a checkpoint.

    Attributes:
        name: of the family.
        explained, left, missing: patterns of tensors that its table has with their shape; that it does not have, or
            with another shape; and that it has and the checkpoint does not.
        renamed: patterns of tensors, and the patterns of its table that they may be under other names: a guess.
        refused, unread, absent: keys of config.json with values that it refuses; that it does not read; and that it
            reads and config.json does not have.
        reads_sizes_only: whether it cannot read the other keys that it knows.
        is_other_kind: whether it is a family of text models and the checkpoint multimodal, or the reverse.
        likeness: the Dice coefficient of both's names, without `ANOTHER_KIND` if that is so; 0 below `LEAST_LIKENESS`.
    """

    name: str
    explained: tuple[str, ...]
    left: tuple[str, ...]
    missing: tuple[str, ...]
    renamed: Mapping[str, str]
    refused: tuple[str, ...]
    unread: tuple[str, ...]
    absent: tuple[str, ...]
    reads_sizes_only: bool
    is_other_kind: bool
    likeness: float

    @property
    def fit(self) -> int:
        """How well shapes, words and keys of config.json fit."""
        faults = len(self.missing) + len(self.refused) + self.reads_sizes_only
        # A name that is known tells more than a shape: without any, shapes are all there is.
        renamed = len(self.renamed) if not self.explained else -len(self.renamed)
        return len(self.explained) + renamed - len(self.left) - MISSING * faults


def fit_of(family: Family, raw: Mapping[str, Any], given: NamePatterns) -> "FamilyFit | None":
    """Returns a family beside a checkpoint with this parsed config.json; None if it cannot read even the sizes."""
    text = text_of(family, raw)
    for config, reads_sizes_only in lenient_readings(family, text):
        with suppress(*FAULTS):
            return FamilyFit(family, config, reads_sizes_only, text, given, is_wrapper=len(parts_of(raw)) > 1)
    return None


def nearest_first(fits: Sequence["FamilyFit"]) -> list["FamilyFit"]:
    """Returns families by how near they are. Names tell more than shapes, which change with each size; of families that
    are equally near the first of the registry is first, which begins with plain families."""
    most = max((each.candidate.likeness for each in fits), default=0.0)

    def nearness(each: "FamilyFit") -> tuple[float, ...]:
        near = each.candidate
        faults = len(near.missing) + len(near.refused) if most else 0
        return min(near.likeness, most - AS_LIKE), not near.is_other_kind, -faults, near.fit

    return sorted(fits, key=nearness, reverse=True)


def _keys_of(family: Family) -> Iterator[tuple[str, Any]]:
    """Yields the keys of config.json that a family reads, with their defaults."""
    for field in fields(family.config):
        if field.name not in family.config.derived:
            yield family.config._key(field.name), field.default


class FamilyFit:
    """A family beside a checkpoint."""

    def __init__(
        self,
        family: Family,
        config: DecoderConfig,
        reads_sizes_only: bool,
        text: Mapping[str, Any],
        given: NamePatterns,
        *,
        is_wrapper: bool,
    ):
        self.family, self.config, self.raw = family, config, text
        self.table = family.release_reader(wrapping=given.wrapping).read(given.sampled, config)
        rows, wanted = self._wanted()
        # Of some encoded matrices only the number of values is known.
        explained = [p for p, shape in wanted.items() if {shape, (prod(shape),)} & given.shapes.get(p, set())]
        skips = self._skipper(given)
        ours = [pattern for pattern in given.names if pattern in wanted or not skips(pattern)]
        self.left = [pattern for pattern in ours if pattern not in explained]
        missing = {p: (shape, rows[p].jax_names[0]) for p, shape in wanted.items() if p not in explained}
        left = {pattern: given.shapes[pattern] for pattern in self.left}
        self.renamed = guessed(left, missing, without_words=not explained)
        self.left = [pattern for pattern in self.left if pattern not in self.renamed]
        refused, unread, self.defaults = self._keys()
        is_other_kind = issubclass(family.config, WrapperConfig) != is_wrapper
        self.unread = {key: self.raw[key] for key in (*refused, *unread)}
        self.candidate = Candidate(
            family.name,
            tuple(explained),
            tuple(self.left),
            tuple(pattern for pattern in missing if pattern not in self.renamed.values()),
            self.renamed,
            tuple(refused),
            tuple(unread),
            tuple(sorted(self.defaults)),
            reads_sizes_only,
            is_other_kind,
            self._likeness({*ours} - given.beside, wanted.keys(), is_other_kind),
        )

    def _wanted(self) -> tuple[dict[str, Map], dict[str, Shape]]:
        """Returns the rows that the config has, and the shapes of their tensors, by patterns of names."""
        one = {letter: layers[:1] for letter, layers in sets_of_layers(self.config).items()}
        config = self.config
        bound = self.table.bind(WithSizes(config, config.sizes, {**config.layer_sets, **one}))
        rows, wanted = {}, {}
        for binding in bound:
            for stack, shape in zip(binding.src, binding.layout.src_shapes(binding.sizes), strict=True):
                pattern = pattern_of(stack.names[0])
                rows[pattern], wanted[pattern] = binding.row, shape[stack.depth :]
        return rows, wanted

    def _skipper(self, given: NamePatterns) -> Callable[[str], bool]:
        """Returns a function that returns True of patterns of tensors that the family skips, and of copies."""
        why_ignored = self.table.ignored(self.config)
        copies = {pattern_of(name) for name in self.table.copies_of(self.config)}
        return lambda pattern: pattern in copies or all(map(why_ignored, given.samples[pattern]))

    def _likeness(self, given: Collection[str], wanted: Collection[str], is_other_kind: bool) -> float:
        """Returns `Candidate.likeness` of a checkpoint with these patterns of names, of which the family wants some.
        Rows that it has for other configs count where the checkpoint has them."""
        possible = {pattern_of(INDEX.sub("0", name)) for row in self.table for name in row.hf_names}
        shared = {*given} & {*wanted, *possible}
        found = 2 * len(shared) / max(len(given) + len({*wanted} | shared), 1) - ANOTHER_KIND * is_other_kind
        return found if found >= LEAST_LIKENESS else 0.0

    def _keys(self) -> tuple[list[str], list[str], dict[str, Any]]:
        """Returns the keys of config.json that the family refuses, and those that it does not read; and the defaults of
        those that it reads and config.json does not have."""
        keys, reads = dict(_keys_of(self.family)), self.family.config
        known = (*keys, *ROPE_KEYS, *reads.known_aliases(), *reads.synonyms, *reads.left_out)
        known = (*known, *reads.implemented_values())
        told = {key for key, value in self.raw.items() if value is not None and key not in NO_EFFECT}
        refused = sorted(told & refused_keys(self.family, self.raw))
        return refused, sorted(told - set(known)), {key: x for key, x in keys.items() if key not in self.raw}

    @property
    def unfit_rows(self) -> list[Map]:
        """The rows that the config has and the checkpoint lacks, or has in another shape."""
        missing = set(self.candidate.missing)
        return [row for row in self.table if any(pattern_of(INDEX.sub("0", name)) in missing for name in row.hf_names)]

    def reads(self, key: str, value: Any) -> bool:
        """Returns True if the family reads a key of config.json with this value."""
        known = key in self.family.config.known_keys() or key in self.family.config.only
        return known and not refused_keys(self.family, {key: value})
