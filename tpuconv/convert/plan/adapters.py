"""Where the changes of adapters go: an adapter names modules as transformers has them, a release as it likes."""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from tpuconv.convert.plan.regrouped import regrouped
from tpuconv.encodings.adapted import ONE_MATRIX, Placed
from tpuconv.encodings.decode import Tensor
from tpuconv.notation.forms import ReleaseReader
from tpuconv.notation.layout import Layout
from tpuconv.notation.release import Release
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.spelling import copies_in_layers, numbers, template
from tpuconv.notation.table import EXPERTS, INDEX, Map
from tpuconv.sources.adapter import Adapter
from tpuconv.sources.adapter_changes import Change, JoinedExperts, LowRank, ReplacedRows, Replacement
from tpuconv.sources.adapter_experts import ExpertChange


def changes_on_disk(
    adapters: Sequence[Adapter],
    reader: ReleaseReader,
    release: Release,
    tensors: Mapping[str, Tensor],
    config: HasSizes,
    *,
    inputs_first: bool,
) -> list[Placed]:
    """Returns the changes of each adapter by the names on disk, in the order of the adapters.

    Args:
        adapters: as they were read.
        reader: of the model's family.
        release: how the model's tensors are named and grouped.
        tensors: the model's, by name on disk.
        config: the model's.
        inputs_first: whether PEFT knows that experts [in, out] are so; else it takes them for [out, in].
    """
    out = []
    for adapter in adapters:
        changes: dict[str, Change] = {}
        missing = []
        single: dict[str, _Single] = {}
        strange: dict[str, LowRank] = {}
        for name, change in adapter.changes.items():
            there = reader.on_disk(name, release) or name
            found_in = None if there in tensors else _all_of(name, change, reader, release, tensors)
            if found_in is not None and isinstance(change, LowRank):
                single.setdefault(found_in.tensor, found_in).changes[found_in.place] = change
            elif there not in tensors and isinstance(change, LowRank) and len(change.shape) == 2:
                strange[name] = change
            else:
                changes[there] = change
        gathered, moved = regrouped(strange, reader, release, tensors, config)
        changes |= gathered | {reader.on_disk(n, release) or n: x for n, x in strange.items() if n not in moved}
        changes |= {tensor: each.joined(tensors[tensor].shape[0]) for tensor, each in single.items()}
        for experts in adapter.experts:
            found = dict(_of_experts(experts, reader, release, tensors, inputs_first))
            changes |= found
            missing += [] if found else [experts.name]
        out.append(Placed(adapter.name, changes, tuple(missing)))
    return out


def of_shared_matrices(placed: Sequence[Placed], copies: Mapping[str, str]) -> tuple[list[Placed], list[str]]:
    """Returns the changes with one for each matrix that layers share, for which PEFT has a change for each layer, and a
    fault for each matrix that layers would change in different ways.

    Args:
        placed: the changes by the names on disk.
        copies: the names of tensors, by the names of their copies.
    """
    layers: dict[str, list[str]] = {}
    for copy, original in copies_in_layers(copies).items():
        layers.setdefault(original, [original]).append(copy)
    out, faults = [], []
    for each in placed:
        changes = dict(each.changes)
        for name, names in layers.items():
            given = [changes.pop(one, None) for one in names]
            if (first := given[0]) is not None and all(_is_same(first, other) for other in given[1:]):
                changes[name] = first
            elif any(change is not None for change in given):
                apart = f"which the adapter {each.adapter} changes apart"
                faults.append(f"{name}  is one matrix of {len(names)} layers, {apart}")
        out.append(replace(each, changes=changes))
    return out, faults


def of_tied_head(placed: Sequence[Placed], heads: Mapping[str, str]) -> tuple[list[Placed], list[str]]:
    """Returns the changes without the changes of heads that share the embedding's matrix, which PEFT may have too, and
    a fault for each matrix that the model would not share any more.

    Args:
        placed: the changes by the names on disk.
        heads: the names of the embeddings, by the names of the heads that share them.
    """
    out, faults = [], []
    for each in placed:
        changes = dict(each.changes)
        for head, embedding in heads.items():
            of_head, first = changes.pop(head, None), changes.get(embedding)
            # PEFT merges pairs of the embedding and rows of tokens into the matrix of both.
            if not _is_same(of_head, first) if of_head is not None else isinstance(first, Replacement):
                one, other = (head, embedding) if of_head else (embedding, head)
                how = "in another way" if of_head and first else "alone"
                faults.append(f"{one}  {ONE_MATRIX} {other}, which the adapter {each.adapter} changes {how}")
        out.append(replace(each, changes=changes))
    return out, faults


def without_ignored(
    placed: Sequence[Placed], tensors: Container[str], why_ignored: Callable[[str], str | None]
) -> tuple[list[Placed], dict[str, list[str]]]:
    """Returns the changes without the changes of modules that the table ignores and the source has under other names,
    such as an encoder of images beside the text model; and the names of these, by the reason.

    Args:
        placed: the changes by the names on disk.
        tensors: the names of the model's tensors.
        why_ignored: returns the reason why the table ignores a tensor.
    """
    out: list[Placed] = []
    ignored: dict[str, list[str]] = {}
    for each in placed:
        reasons = {name: why for name in each.changes if name not in tensors and (why := why_ignored(name))}
        for name, why in reasons.items():
            ignored.setdefault(why, []).append(name)
        out.append(replace(each, changes={name: x for name, x in each.changes.items() if name not in reasons}))
    return out, ignored


def _is_same(change: Change, other: Change | None) -> bool:
    """Returns True if both changes have the same values."""
    if isinstance(change, Replacement) and isinstance(other, Replacement):
        return np.array_equal(change.file.values(change.values), other.file.values(other.values))
    if isinstance(change, ReplacedRows) and isinstance(other, ReplacedRows):
        same = change.rows == other.rows
        return same and np.array_equal(change.file.values(change.values), other.file.values(other.values))
    if not isinstance(change, LowRank) or not isinstance(other, LowRank) or change.magnitude is not None:
        return False
    pairs = ((change.left, other.left), (change.right, other.right))
    return change.scaling == other.scaling and all(
        np.array_equal(change.file.values(mine), other.file.values(theirs)) for mine, theirs in pairs
    )


@dataclass
class _Single:
    """The changes of single experts in a tensor on disk that holds all: of the matrix at `place`, an expert and a
    part, and of the others that are added."""

    tensor: str
    place: tuple[int, int]
    parts: int
    input_first: bool
    changes: dict[tuple[int, int], LowRank] = field(default_factory=dict)

    def joined(self, count: int) -> JoinedExperts:
        """Returns the change of the tensor."""
        return JoinedExperts(self.changes, count, self.parts, self.input_first)


def _all_of(
    name: str, change: Change, reader: ReleaseReader, release: Release, tensors: Mapping[str, Tensor]
) -> _Single | None:
    """Returns where the matrix of one expert is in a tensor of all experts; None if it is in none, or its rows would be
    scaled (DoRA)."""
    spelled = reader.speller.spelled(name)
    if spelled is None or not isinstance(change, LowRank) or change.magnitude is not None or len(change.shape) != 2:
        return None
    for place in reader.places:
        rows = [row for form in place.forms.values() for row in form]
        row = next((row for row in rows if template(spelled) == template(row.hf_names[0]) and _is_single(row)), None)
        for stacked in rows if row is not None else ():
            if _is_single(stacked) or row is None or row.jax_names[0] not in stacked.jax_names:
                continue
            values = dict(zip(INDEX.findall(row.hf_names[0]), numbers(spelled), strict=True))
            found = INDEX.sub(lambda index: values[index[1]], stacked.hf_names[0])  # noqa: B023
            tensor = tensors.get(reader.on_disk(found, release) or found)
            if tensor is not None and len(tensor.shape) == 3:
                part = stacked.jax_names.index(row.jax_names[0])
                input_first = tensor.scheme is None and _is_input_first(stacked)
                return _Single(tensor.name, (int(values[EXPERTS]), part), len(stacked.jax_names), input_first)
    return None


def _is_single(row: Map) -> bool:
    """Returns True if a row has a tensor for each expert."""
    return f"{{{EXPERTS}}}" in row.hf_names[0]


def _of_experts(
    change: ExpertChange, reader: ReleaseReader, release: Release, tensors: Mapping[str, Tensor], inputs_first: bool
) -> Iterator[tuple[str, LowRank]]:
    """The changes of the tensors that hold a parameter of all experts: one tensor, or some of each expert."""
    name = reader.speller.spelled(change.name) or change.name
    row = next((row for row in reader.rows if template(name) in map(template, row.hf_names)), None)
    if (stacked := tensors.get(reader.on_disk(name, release) or name)) is not None:
        if len(stacked.shape) == 2:  # a matrix that is named as a parameter
            yield stacked.name, change.alone()
        elif len(stacked.shape) == 3:
            input_first = inputs_first and stacked.scheme is None and row is not None and _is_input_first(row)
            yield stacked.name, change.stacked(stacked.shape[0], input_first=input_first)
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
    """Whether a row's tensor has the axis of the inputs before the axis of the outputs, as its parameters have them."""
    layout = Layout.parse(row.layout)
    return layout.src[0][1] == layout.dst[0][1]


def _single(row: Map, reader: ReleaseReader) -> Iterator[list[str]]:
    """The names of the tensors of one expert that make the parameters of a row, in the order of these, in each form
    that has a tensor for each expert."""
    for place in reader.places:
        if not any(row in form for form in place.forms.values()):
            continue
        for form in place.forms.values():
            of = {each.jax_names[0]: each.hf_names[0] for each in form if _is_single(each)}
            if names := [of[name] for name in row.jax_names if name in of]:
                yield names
