"""Changes of matrices that a release joins, splits or orders in another way than transformers' modules, which adapters
name: queries, keys and values in one tensor, or the two matrices of an MLP."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from tpuconv.notation.forms import FormPlace, ReleaseReader
from tpuconv.notation.layout import format_axes
from tpuconv.notation.release import Release
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.spelling import template
from tpuconv.notation.table import Binding, MappingTable
from tpuconv.sources.adapter_changes import GatheredRows, LowRank


@dataclass(frozen=True)
class _Tensor:
    """A tensor on disk, and the modules' tensors whose rows it has, all by their names in the family's forms."""

    name: str
    binding: Binding
    modules: tuple[Binding, ...]


def regrouped(
    changes: Mapping[str, LowRank],
    reader: ReleaseReader,
    release: Release,
    tensors: Mapping[str, object],
    config: HasSizes,
) -> tuple[dict[str, GatheredRows], set[str]]:
    """Returns the changes of the tensors on disk that have the rows of changed modules, and the names of those modules.

    Args:
        changes: of matrices [rows, columns] that are not on disk, by their names in the adapter.
        reader: of the model's family.
        release: how the model's tensors are named and grouped.
        tensors: the model's, by name on disk.
        config: the model's.
    """
    spelled = {found: name for name in changes if (found := reader.speller.spelled(name)) is not None}

    def on_disk(name: str) -> str:
        return reader.on_disk(name, release) or name

    out: dict[str, GatheredRows] = {}
    moved: set[str] = set()
    for place in reader.places:
        known = {template(name) for form in place.forms.values() for row in form for name in row.hf_names}
        own = [name for name in spelled if template(name) in known]
        forms = _bindings(place, reader.table, config) if own else []
        for tensor in _tensors(own, forms, lambda name: on_disk(name) in tensors):
            given = {
                name: changes[spelled[name]] for each in tensor.modules for name in _names(each) if name in spelled
            }
            if (gathered := _gathered(tensor, given)) is not None:
                out[on_disk(tensor.name)] = gathered
                moved |= {spelled[name] for name in given}
    return out, moved


def _bindings(place: FormPlace, table: MappingTable, config: HasSizes) -> list[list[Binding]]:
    """The bindings of each form of a place."""
    return [table.with_rows(rows).bind(config, include_mtp=True) for rows in place.forms.values()]


def _names(binding: Binding) -> list[str]:
    return [name for stack in binding.src for name in stack.names]


def _parameters(binding: Binding) -> set[str]:
    return {name for stack in binding.dst for name in stack.names}


def _tensors(names: list[str], forms: list[list[Binding]], is_there: Callable[[str], bool]) -> Iterator[_Tensor]:
    """The tensors on disk that make the parameters of modules, each once."""
    by_name = {name: (each, form) for form in forms for each in form for name in _names(each)}
    found: dict[str, _Tensor] = {}
    for name in names:
        module, form = by_name.get(name, (None, None))
        if module is None or form is None:
            continue
        for other in (each for others in forms if others is not form for each in others):
            if not _parameters(other) & _parameters(module) or not all(map(is_there, _names(other))):
                continue
            modules = tuple(each for each in form if _parameters(each) & _parameters(other))
            found |= {each: _Tensor(each, other, modules) for each in _names(other)}
    yield from found.values()


def _gathered(tensor: _Tensor, changes: Mapping[str, LowRank]) -> GatheredRows | None:
    """The change of a tensor; None if its rows are not rows of the changed matrices."""
    bindings = (tensor.binding, *tensor.modules)
    columns = {format_axes(axes[-1:]) for each in bindings for axes in each.layout.src if len(axes) == 2}
    shapes = {name: shape for each in tensor.modules for name, shape in each.src_shapes().items()}
    is_alike = all(len(axes) == 2 for each in bindings for axes in each.layout.src) and len(columns) == 1
    if not is_alike or any(shapes[name] != change.shape for name, change in changes.items()):
        return None
    order = list(changes)
    first = {name: sum(len(changes[each].left) for each in order[:place]) for place, name in enumerate(order)}

    def rows(name: str) -> np.ndarray:
        count = shapes[name][0]
        numbers = first[name] + np.arange(count) if name in changes else np.full(count, -1)
        return numbers[:, None]

    # One column shows where all go: the columns of both sides are the same.
    letters = {letter for each in bindings for axes in each.layout.src for letter in axes[-1].letters()}

    def narrow(each: Binding) -> Binding:
        return replace(each, sizes={**each.sizes, **dict.fromkeys(letters, 1)})

    made: dict[str, np.ndarray] = {}
    for each in tensor.modules:
        made |= narrow(each)(rows)
    source = narrow(tensor.binding).inverse(made.__getitem__)[tensor.name][:, 0]
    return GatheredRows(tuple(changes.values()), source)
