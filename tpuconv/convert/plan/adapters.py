"""Where the changes of adapters go: an adapter names modules as transformers has them, a release as it likes."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from tpuconv.encodings.adapted import Placed
from tpuconv.encodings.decode import Tensor
from tpuconv.layout import Layout
from tpuconv.mapping.forms import ReleaseReader
from tpuconv.mapping.release import Release
from tpuconv.mapping.spelling import numbers, template
from tpuconv.mapping.table import EXPERTS, INDEX, Map
from tpuconv.sources.adapter import Adapter
from tpuconv.sources.adapter_changes import Change, LowRank
from tpuconv.sources.adapter_experts import ExpertChange


def changes_on_disk(
    adapters: Sequence[Adapter], reader: ReleaseReader, release: Release, tensors: Mapping[str, Tensor]
) -> list[Placed]:
    """Returns the changes of each adapter by the names on disk, in the order of the adapters.

    Args:
        adapters: as they were read.
        reader: of the model's family.
        release: how the model's tensors are named and grouped.
        tensors: the model's, by name on disk.
    """
    out = []
    for adapter in adapters:
        changes: dict[str, Change] = {}
        missing = []
        for name, change in adapter.changes.items():
            changes[reader.on_disk(name, release) or name] = change
        for experts in adapter.experts:
            found = dict(_of_experts(experts, reader, release, tensors))
            changes |= found
            missing += [] if found else [experts.name]
        out.append(Placed(adapter.name, changes, tuple(missing)))
    return out


def _of_experts(
    change: ExpertChange, reader: ReleaseReader, release: Release, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, LowRank]]:
    """The changes of the tensors that hold a parameter of all experts: one tensor, or some of each expert."""
    name = reader.speller.spelled(change.name) or change.name
    row = next((row for row in reader.rows if template(name) in map(template, row.hf_names)), None)
    if (stacked := tensors.get(reader.on_disk(name, release) or name)) is not None:
        if len(stacked.shape) == 3:
            count, input_first = stacked.shape[0], stacked.scheme is None and row is not None and _is_input_first(row)
            yield stacked.name, change.stacked(count, input_first=input_first)
    elif row is not None:
        values = dict(zip(INDEX.findall(row.hf_names[0]), numbers(name), strict=True))
        for parts in _single(row, reader):

            def on_disk(part: str, expert: int, values: Mapping[str, str] = values) -> str:
                own = INDEX.sub(lambda index: {**values, EXPERTS: str(expert)}[index[1]], part)
                return reader.on_disk(own, release) or own

            count = next(expert for expert in range(len(tensors) + 1) if on_disk(parts[0], expert) not in tensors)
            for expert in range(count):
                start = 0
                for part in (on_disk(part, expert) for part in parts):
                    if part in tensors:
                        size = prod(tensors[part].shape[:-1])
                        yield part, change.of_expert(expert, count, slice(start, start + size))
                        start += size
            if count:
                return


def _is_input_first(row: Map) -> bool:
    """Whether a row's tensor has the axis of the inputs before that of the outputs, as its parameters have them."""
    layout = Layout.parse(row.layout)
    return layout.src[0][1] == layout.dst[0][1]


def _single(row: Map, reader: ReleaseReader) -> Iterator[list[str]]:
    """The names of the tensors of one expert that make the parameters of a row, in the order of these, in each form
    that has a tensor for each expert."""
    for place in reader.places:
        if not any(row in form for form in place.forms.values()):
            continue
        for form in place.forms.values():
            of = {each.jax_names[0]: each.hf_names[0] for each in form if f"{{{EXPERTS}}}" in each.hf_names[0]}
            if names := [of[name] for name in row.jax_names if name in of]:
                yield names
