"""Finds the pairs of low-rank matrices in a trainer's tree, and makes of them the pairs of released matrices.

Qwix, and with it Tunix and MaxText, puts them beside the parameter that they change: `kernel_lora_a` and
`kernel_lora_b` beside `kernel`. The parameters may be in the tree or not, quantized or not.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tpuconv.checkpoint.orbax_tree import TreeArray
from tpuconv.convert.export.way_back import Reading, SavedForm, front_of, state_of, tree_forms, without_states
from tpuconv.convert.plan.types import Skip
from tpuconv.errors import LayoutError, MappingError, shorten
from tpuconv.location import Location
from tpuconv.models.registry import Family
from tpuconv.names import LEAF, collapse
from tpuconv.notation.pairs import PAIR_ENDS, Pair, PairRow
from tpuconv.notation.table import Binding
from tpuconv.sources.headers import CODES
from tpuconv.storage.hashes import hash_bytes


class PairTree(Protocol):
    """The arrays of a tree, by their dotted names."""

    @property
    def folder(self) -> Location:
        """The folder, for messages."""

    @property
    def names(self) -> Collection[str]:
        """The names of all arrays."""

    def open(self, names: Collection[str]) -> Mapping[str, TreeArray]:
        """Opens arrays, which can be read from then on."""

    def read(self, name: str, box: Sequence[slice]) -> np.ndarray:
        """Returns a box of an array that was opened."""

    @property
    def identity(self) -> str:
        """Equal for trees with the same arrays."""

    @property
    def stamps(self) -> dict[str, str]:
        """By file, what changes when it is written or replaced; empty if the identity shows it."""

    @property
    def stamps_for_hosts(self) -> dict[str, str]:
        """The same, equal on all hosts that see the files."""

    def check_unchanged(self) -> None:
        """Raises SourceError if an array was changed since the tree was opened."""


@dataclass(frozen=True)
class TrainedPairs:
    """The pairs of a tree.

    Attributes:
        form: of the tree.
        names: by the parameter that is changed, the names of the two arrays in the tree.
        skipped: what is not exported.
    """

    form: SavedForm
    names: Mapping[str, tuple[str, str]]
    skipped: tuple[Skip, ...]


def explain_pairs(
    tree: PairTree, family: Family, model_type: str, readings: Sequence[Reading], target: str | None
) -> TrainedPairs:
    """Returns the parameters that the pairs of a tree change.

    Args:
        tree: what was saved.
        family, model_type: of config.json.
        readings: of the model.
        target: whose tree it is; None: of each target in turn.

    Raises:
        UnsupportedConfig: the target does not have the model.
        MappingError: there are no pairs, or some change no parameter of the model, or have one array. They are named.
        UsageError: there is no such target, or it has no arrays.
    """
    names = [name for name in tree.names if not state_of(name)]  # an optimizer has moments of pairs
    halves = [
        {bare.removesuffix(end): name for name in names if (bare := name.removesuffix(LEAF)).endswith(end)}
        for end in PAIR_ENDS
    ]
    if not halves[0]:
        raise MappingError(
            f"{tree.folder} has no pairs of low-rank matrices: no array's name ends with {PAIR_ENDS[0]}",
            details=shorten(list(collapse(sorted(tree.names)))),
            hint="leave out `adapter=` or `merge=`, or give the checkpoint with the parameters of LoRA",
        )
    if alone := sorted(halves[0].keys() ^ halves[1].keys()):
        raise MappingError(
            f"{tree.folder} has one matrix of {len(alone)} pairs, and not the other",
            details=shorten(list(collapse(alone))),
            hint="the checkpoint is not complete: take another step",
        )
    best: tuple[SavedForm, dict[str, tuple[str, str]], list[str]] | None = None
    for form in tree_forms(tree.names, family, model_type, readings, target):
        wanted = form.parameters()
        front = front_of(halves[0], wanted)
        found = {
            name: (halves[0][front + key], halves[1][front + key])
            for key, name in wanted.items()
            if front + key in halves[0]
        }
        unknown = [name for name in halves[0] if not name.startswith(front) or name.removeprefix(front) not in wanted]
        if best is None or len(unknown) < len(best[2]):
            best = form, found, unknown
    assert best is not None
    form, found, unknown = best
    if unknown:
        raise MappingError(
            f"{len(unknown)} pairs of {tree.folder} change no parameter of {family.name}, as {form} has it",
            details=shorten(list(collapse(sorted(unknown)))),
            hint="give the config of the model that was trained",
        )
    others, skipped = without_states(set(tree.names) - {name for pair in found.values() for name in pair})
    base = (Skip("*", len(others), "arrays of the model that the adapter changes"),) if others else ()
    return TrainedPairs(form, found, (*base, *skipped))


ReadRow = tuple[PairRow, dict[str, Pair]]
"""A row, and the pairs of its parameters, some of which may have none."""


def read_pairs(tree: PairTree, pairs: TrainedPairs, alpha: float) -> list[ReadRow]:
    """Reads the pairs. Each is scaled by alpha divided by its rank.

    Raises:
        MappingError: an array is no part of a pair, or what it changes is no matrix. They are named.
        SourceError: an array cannot be read.
    """
    stored = tree.open([name for pair in pairs.names.values() for name in pair])
    out: list[ReadRow] = []
    faults: list[str] = []
    for binding in pairs.form.table.bind(pairs.form.config, pairs.form.include_mtp):
        changed = [name for name in binding.dst_shapes() if name in pairs.names]
        if not changed:
            continue
        try:
            row = PairRow(binding)
            _check_layer(binding, changed)
            out.append((row, {name: _pair(tree, stored, row, name, pairs.names[name], alpha) for name in changed}))
        except LayoutError as error:
            faults.append(f"{', '.join(changed)}: {error}")
    if faults:
        raise MappingError(
            f"{len(faults)} pairs of {tree.folder} change no matrix of the model",
            details=shorten(faults),
            hint="give the config of the model that was trained; an adapter of PEFT can only change linear layers",
        )
    return out


def _check_layer(binding: Binding, names: Sequence[str]) -> None:
    """Raises LayoutError for what PEFT does not change as Qwix does: an embedding, of which Qwix changes the product
    with hidden states and PEFT the rows; and a parameter of another module than a linear layer or experts."""
    if binding.dst_axes()[names[0]] == "V D" and not binding.row.part:
        raise LayoutError("it changes the head that shares the embedding, and PEFT would change the embedding too")
    if not any(name.endswith(".weight") or ".experts." in name for name in binding.src_shapes()):
        raise LayoutError(f"{binding.src[0].names[0]} is the weight of no linear layer")


def _pair(
    tree: PairTree, stored: Mapping[str, TreeArray], row: PairRow, name: str, arrays: tuple[str, str], alpha: float
) -> Pair:
    found = []
    for each in arrays:
        if stored[each].dtype not in CODES:
            raise LayoutError(f"{each} has the dtype {stored[each].dtype}")
        found.append(tree.read(each, [slice(0, n) for n in stored[each].shape]))
    return row.arranged(name, found[0], found[1], alpha)


class MergedPairs:
    """Pairs that are added to the parameters that they change. Changes are computed in float32, and the sum is rounded
    once, to the dtype of the parameter.

    Args:
        rows: the pairs of the tree.
        alpha: of the training.
    """

    def __init__(self, rows: Sequence[ReadRow], alpha: float):
        self._pairs = {name: (row, pair) for row, pairs in rows for name, pair in pairs.items()}
        self._alpha = alpha

    def identity(self, tree: str) -> str:
        """Returns the identity of the sums, from the identity of the tree."""
        return str(hash_bytes(json.dumps([tree, "merged", self._alpha]).encode())["xxh3_128"])

    def added(self, name: str, box: Sequence[slice], values: np.ndarray) -> np.ndarray:
        """Returns a box of a parameter, of which these are the values, with its change."""
        if name not in self._pairs:
            return values
        row, pair = self._pairs[name]
        merged: np.ndarray = (values.astype(np.float32) + row.change(name, pair, box)).astype(values.dtype)
        return merged
