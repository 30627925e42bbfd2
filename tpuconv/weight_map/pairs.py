"""Pairs of LoRA from one tree to another one, by the rows of both trees."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tpuconv.errors import LayoutError, MappingError, shorten
from tpuconv.names import collapse
from tpuconv.notation.pairs import Pair, PairRow
from tpuconv.weight_map.trees import MappedTree

TreePairs = Mapping[str, tuple[Any, Any]]
"""By the name of the array that a pair changes, its two matrices, as a trainer has them; in a tree of released names as
PEFT has them: A [r, in] and B [out, r]."""


def mapped_pairs(source: MappedTree, target: MappedTree, pairs: TreePairs, alpha: float) -> dict[str, Any]:
    """Returns the pairs of a target's arrays. Each is scaled by alpha divided by its rank, on both sides.

    Raises:
        MappingError: an array is not in the source, or is no matrix in one of the trees. They are named.
    """
    faults: list[str] = []
    released: dict[str, Pair] = {}
    given = {name: tuple(map(np.asarray, pair)) for name, pair in pairs.items() if _is_pair(pair)}
    faults += [f"{name}: two matrices are a pair" for name in pairs if name not in given]
    for binding in source.rows:
        own = {name: given.pop(name) for name in binding.dst_shapes() if name in given}
        try:
            if not own:
                continue
            if source.form.has_released_names:
                released |= {name: Pair(a, b, alpha / b.shape[-1]) for name, (a, b) in own.items()}
            else:
                row = PairRow(binding)
                released |= row.released({name: row.arranged(name, a, b, alpha) for name, (a, b) in own.items()})
        except LayoutError as error:
            faults.append(f"{', '.join(own)}: {error}")
    faults += [f"{name}: not in the tree {source.form.title}" for name in collapse(given)]
    out: dict[str, Any] = {}
    for binding in target.rows:
        wanted = {name: released[name] for name in binding.src_shapes() if name in released}
        try:
            if target.form.has_released_names:
                out |= {name: (pair.a, pair.b) for name, pair in wanted.items()}
            elif wanted:
                row, flat = PairRow(binding), bool(target.form.target and target.form.target.pairs.is_flat)
                for name, pair in row.of_parameters(wanted).items():
                    a, b = row.stored(name, pair, alpha, flat=flat)
                    out[name] = (a.values, b.values)
        except LayoutError as error:
            faults.append(f"{', '.join(wanted)}: {error}")
    if faults:
        raise MappingError(
            f"{len(faults)} pairs have no place in the tree {target.form.title}",
            details=shorten(faults),
            hint="LoRA changes matrices alone",
        )
    return out


def _is_pair(pair: Any) -> bool:
    """Returns True for two arrays that are not empty and have rows and columns, of one matrix or of each of several."""
    are_arrays = isinstance(pair, tuple | list) and len(pair) == 2 and all(hasattr(x, "shape") for x in pair)
    return are_arrays and all(len(x.shape) > 1 and 0 not in x.shape for x in pair)
