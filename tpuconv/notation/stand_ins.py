"""Tensors that stand for others: of arrays that a program has and no layer reads, a checkpoint may have no tensors."""

from itertools import product

from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import MappingTable, row_indices


def stand_ins(table: MappingTable, config: HasSizes) -> dict[str, str]:
    """Returns the tensors that are taken where others are missing, by the names of those."""
    out, sets = {}, config.layer_sets
    for row in table:
        for number in sets.get(row.otherwise, ()):
            ((letter,), _) = row_indices(row)
            for name, layer in product(row.hf_names, sets[letter]):
                out[name.replace(f"{{{letter}}}", str(layer))] = name.replace(f"{{{letter}}}", str(number))
    return out
