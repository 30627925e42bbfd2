"""A family beside a checkpoint: what it explains of the tensors and of config.json."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from tpuconv.convert.plan.renaming import guessed
from tpuconv.encodings.decode import Tensor
from tpuconv.errors import TpuconvError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.config_keys import NO_EFFECT
from tpuconv.models.common.rope import ROPE_KEYS
from tpuconv.models.common.wrapper import WrapperConfig
from tpuconv.models.registry import Family
from tpuconv.notation.layout import Shape
from tpuconv.notation.sizes import WithSizes, sets_of_layers
from tpuconv.notation.table import INDEX, Map

MISSING = 4
"""How much worse it is if the checkpoint lacks what a family has than if the family lacks what the checkpoint has: what
is left may be added to a family, what is missing must be taken out. A value that the family refuses counts as much."""

NAME_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""A number between dots."""


def pattern_of(name: str) -> str:
    """Returns the pattern of names that differ from this one in numbers only."""
    return NAME_NUMBER.sub("{}", name)


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
        reads_sizes_only: whether it cannot read the other keys that it knows, such as rotary positions of another form.
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

    @property
    def score(self) -> int:
        """The family with the largest is the nearest; of equal ones the first of the registry, which begins with plain
        families."""
        faults = len(self.missing) + len(self.refused) + self.reads_sizes_only
        # A name that is known tells more than a shape: without any, shapes are all there is.
        renamed = len(self.renamed) if not self.explained else -len(self.renamed)
        return len(self.explained) + renamed - len(self.left) - MISSING * faults


def _text_of(family: Family, raw: Mapping[str, Any]) -> Mapping[str, Any]:
    return family.config.text_of(raw) if issubclass(family.config, WrapperConfig) else raw


def lenient_config(family: Family, raw: Mapping[str, Any]) -> tuple[DecoderConfig, bool] | None:
    """Returns the family's reading of what it knows of a config.json; of the sizes alone, and then True, if it cannot
    read that. None if it cannot read these either."""
    text = _text_of(family, raw)
    known = {*family.config.known_keys(), *ROPE_KEYS}
    sizes = {family.config._key(field.name) for field in fields(DecoderConfig)}
    for keys in (known, sizes):
        some = {key: value for key, value in text.items() if key in keys and not _is_refused(family, key, value)}
        some["model_type"] = family.config.model_type
        try:
            inside = {"text_config": some} if issubclass(family.config, WrapperConfig) else some
            return family.config.from_hf(inside), keys is sizes
        except TpuconvError:
            continue
    return None


def _keys_of(family: Family) -> Iterator[tuple[str, Any]]:
    """Yields the keys of config.json that a family reads, with their defaults."""
    for field in fields(family.config):
        if field.name not in family.config.derived:
            yield family.config._key(field.name), field.default


def _is_refused(family: Family, key: str, value: Any) -> bool:
    allowed = family.config.implemented_values().get(key)
    return allowed is not None and value not in allowed


class FamilyFit:
    """A family beside a checkpoint."""

    def __init__(
        self,
        family: Family,
        config: DecoderConfig,
        reads_sizes_only: bool,
        raw: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        patterns: Mapping[str, Collection[str]],
        shapes: Mapping[str, set[Shape]],
    ):
        self.family, self.config, self.raw = family, config, _text_of(family, raw)
        self.table = family.table_for(tensors, config)
        one = {letter: layers[:1] for letter, layers in sets_of_layers(config).items()}
        bound = self.table.bind(WithSizes(config, config.sizes, {**config.layer_sets, **one}))
        rows = {pattern_of(name): binding.row for binding in bound for name in binding.src_shapes()}
        wanted = {pattern_of(name): shape for binding in bound for name, shape in binding.src_shapes().items()}
        # Of some encoded matrices only the number of values is known.
        explained = [p for p, shape in wanted.items() if {shape, (prod(shape),)} & shapes.get(p, set())]
        why_ignored = self.table.ignored(config)
        copies = {pattern_of(name) for name in self.table.copies_of(config)}
        self.left = [
            pattern
            for pattern, names in patterns.items()
            if pattern not in explained and pattern not in copies and not all(map(why_ignored, names))
        ]
        missing = {p: (shape, rows[p].jax_names[0]) for p, shape in wanted.items() if p not in explained}
        left = {pattern: shapes[pattern] for pattern in self.left}
        self.renamed = guessed(left, missing, without_words=not explained)
        self.left = [pattern for pattern in self.left if pattern not in self.renamed]
        keys = dict(_keys_of(family))
        reads = family.config
        known = (*keys, *ROPE_KEYS, *reads.known_aliases(), *reads.synonyms, *reads.left_out)
        known = (*known, *reads.implemented_values())
        told = {key for key, value in self.raw.items() if value is not None and key not in NO_EFFECT}
        refused = sorted(key for key in told if _is_refused(family, key, self.raw[key]))
        unread = sorted(told - set(known))
        self.unread = {key: self.raw[key] for key in (*refused, *unread)}
        self.defaults = {key: default for key, default in keys.items() if key not in self.raw}
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
        )

    @property
    def unfit_rows(self) -> list[Map]:
        """The rows that the config has and the checkpoint lacks, or has in another shape."""
        missing = set(self.candidate.missing)
        return [row for row in self.table if any(pattern_of(INDEX.sub("0", name)) in missing for name in row.hf_names)]

    def reads(self, key: str, value: Any) -> bool:
        """Returns True if the family reads a key of config.json with this value."""
        known = key in self.family.config.known_keys() or key in self.family.config.only
        return known and not _is_refused(self.family, key, value)
