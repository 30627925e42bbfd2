"""Planning: every tensor of the source is used or skipped exactly once, every parameter of the table is produced once,
and shapes and dtypes fit. Faults are collected and raised together, before a byte of the weights is read."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tpuconv.convert.plan.adapters import changes_on_disk, of_shared_matrices, of_tied_head, without_ignored
from tpuconv.convert.plan.cutting import cut_binding
from tpuconv.convert.plan.options import Options
from tpuconv.convert.plan.quantization import Quantization
from tpuconv.convert.plan.types import (
    FIT_WITHOUT,
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    IS_MISSING,
    OTHER_DTYPE,
    ZEROS,
    OutputArray,
    Plan,
    Skip,
)
from tpuconv.convert.plan.units import Slab
from tpuconv.encodings.adapted import BY_ADAPTER, Adapted, Placed, adapt
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.passthrough_rows import Passthrough, pass_through
from tpuconv.encodings.reshaped import recut, shaped
from tpuconv.encodings.tensors import decode_names, is_encoded, unused_reason
from tpuconv.errors import MappingError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models.common.ignored import IgnoredKey
from tpuconv.models.common.saved import INPUTS_FIRST
from tpuconv.models.registry import get_family
from tpuconv.names import OWN_TARGET, collapse
from tpuconv.notation.forms import ReleaseReader
from tpuconv.notation.layout import Shape
from tpuconv.notation.sizes import MTP, HasSizes, WithSizes, sets_of_layers
from tpuconv.notation.spelling import by_template, template
from tpuconv.notation.stand_ins import stand_ins
from tpuconv.notation.table import EXPERTS, LAYERS, PERIODS, PLACES, Binding, MappingTable, row_indices
from tpuconv.sources.config import ENCODING_KEYS
from tpuconv.sources.source import Source
from tpuconv.targets.registry import get_target
from tpuconv.targets.target import Target
from tpuconv.text import format_count

TENSORS_TO_LIST = 100_000
"""Missing tensors that are listed by name: as many as the largest models have."""


def make_plan(
    source: Source,
    family: str,
    table: MappingTable,
    config: HasSizes,
    options: Options,
    ignored_config: tuple[IgnoredKey, ...] = (),
    decoded: tuple[Mapping[str, Tensor], Sequence[str]] | None = None,
) -> Plan:
    """Plans a conversion from headers alone. What does not fit is not raised here: see `Plan.check`. A quantization is
    added by `with_quantization`.

    Args:
        source: with its headers.
        family: name of the family.
        table: of the family, or of a checkpoint.
        config: the family's reading of config.json.
        options: what to convert, and how.
        ignored_config: keys of config.json that are not read; the plan lists them.
        decoded: the result of `decode_names` for the source, where several plans share it.

    Raises:
        UsageError: `options.layers` lies outside of the model, the model has no layers for `include_mtp`, or
            `encoding` is "keep" and nothing is encoded, or the target has no encoded parameters.
        UnsupportedConfig: an encoding that is not implemented, or layers that cannot be stacked.
        MappingError: the config needs so many more tensors than there are that they are not listed.
    """
    target, mtp = get_target(options.target), options.include_mtp
    table = _checked_table(source, table, config, options)
    decoded = decoded or decode_names(source.tensors, source.encoding, any_scales=options.allow_nonfinite)
    tensors, faults = dict(decoded[0]), list(decoded[1])
    encoded = is_encoded(tensors, faults)
    if source.encoding is not None and not encoded:
        warning = "transformers may quantize the weights when it loads them"
        key = IgnoredKey(ENCODING_KEYS[0], dict(source.encoding), "no tensor is stored as it says", warning)
        ignored_config = (*ignored_config, key)
    cut_table, cut_config = _cut_layers(table, config, options.layers)
    others = {name: other for name, other in stand_ins(cut_table, cut_config).items() if name not in tensors}
    tensors |= {name: tensors[other] for name, other in others.items() if other in tensors}
    bindings = [b.swapped(partial(_is_input_first, tensors)) for b in cut_table.bind(cut_config, mtp)]
    expected = {name: shape for b in bindings for name, shape in b.src_shapes().items()}
    everywhere = {name for b in table.bind(config) for name in b.src_shapes()} if options.layers else set(expected)
    known_copies = table.copies_of(config, mtp)
    tensors = _with_originals(tensors, known_copies, everywhere)
    if options.adapters and options.encoding == "keep":
        raise UsageError("an adapter changes weights, so they cannot stay encoded", hint='leave out `encoding="keep"`')
    input_first = {name for b in bindings if b.row.input_first for name in b.src_shapes()}
    tensors = recut(shaped(tensors, expected), expected, table.recut_groups(config, mtp))
    parts = getattr(config, "parts", {})
    placed_changes: Sequence[Placed] = ()
    if options.adapters:
        whole = _with_carried(source, family, table, config, options) if target.is_safetensors else config
        reader = get_family(family).release_reader(table.returns, getattr(whole, "parts", {}))
        release = table.release if whole is config else reader.read(source.tensors, whole).release
        inputs_first = family in INPUTS_FIRST
        placed_changes = changes_on_disk(options.adapters, reader, release, tensors, whole, inputs_first=inputs_first)
    placed_changes, apart = of_shared_matrices(placed_changes, known_copies)
    heads = {copy: x for copy, x in known_copies.items() if copy not in expected and template(copy) == copy}
    placed_changes, untied = of_tied_head(placed_changes, heads)
    why_ignored = table.ignored(config, mtp)
    placed_changes, elsewhere = without_ignored(placed_changes, tensors, why_ignored)
    tensors, misfits = adapt(tensors, placed_changes, input_first)
    tensors |= {name: tensors[other] for name, other in others.items() if other in tensors}  # with adapters
    faults += apart + untied + misfits
    copies = {
        name: original
        for name in tensors
        if name not in everywhere and (original := _original(name, known_copies, expected))
    }
    copies |= _zero_biases(tensors, everywhere, why_ignored)
    skipped = {why + BY_ADAPTER: names for why, names in elsewhere.items()}
    unmapped, lost = [], [name for names in elsewhere.values() for name in names if target.is_safetensors]
    for name, tensor in tensors.items():
        if name in expected:
            continue
        if name in everywhere:
            assert options.layers is not None
            reason: str | None = f"outside `layers=` {options.layers.start}-{options.layers.stop - 1}"
        elif name in copies:
            reason = f"a copy of {copies[name]}" if copies[name] else ZERO_BIASES
        else:
            reason = why_ignored(name) or (unused_reason(name) if source.encoding else None)
        if reason is None:
            unmapped.append(name)
            continue
        if isinstance(tensor, Adapted) and name not in everywhere:
            lost += [name] if name in copies or (target.is_safetensors and tensor.scheme is not None) else []
            reason += BY_ADAPTER
        skipped.setdefault(reason, []).extend(info.name for info in tensor.stored)
    faults += [f"{p}  is changed by an adapter, and not converted" for p in collapse(lost)]
    is_found = not expected.keys().isdisjoint(tensors)  # beside a copy with a front, such as an average of weights
    front = (
        []
        if is_found
        else _strange_front(lambda: get_family(family).release_reader(table.returns, parts), why_ignored, unmapped)
    )
    faults += front or _coverage_faults(source, tensors, bindings, expected, unmapped, copies)

    if options.encoding == "keep" and not encoded:
        raise UsageError(
            f"{source.name} is not encoded: there are no quantized values and scales to keep",
            hint="leave `encoding=` out",
        )
    skips = [Skip(p, len(names), why) for why, all_names in skipped.items() for p, names in collapse(all_names).items()]
    covered = Plan(
        source=source,
        tensors=tensors,
        family=family,
        table=table,
        options=options,
        bindings=tuple(bindings),
        skipped=tuple(skips),
        copies=copies,
        unmapped=tuple(unmapped),
        faults=tuple(faults),
        ignored_config=ignored_config,
        target=target,
        config=config,
        empty=tuple(f"{target.root}{name}" for name, is_empty in target.empty.items() if is_empty(config)),
    )
    return _laid_out(covered, None)


def with_quantization(plan: Plan, quantization: Quantization) -> Plan:
    """Returns the plan with parameters that are quantized. Before, none may stay encoded.

    Raises:
        UsageError, UnsupportedConfig: the target has no parameters of this form.
    """
    assert not plan.passthrough
    return _laid_out(plan, quantization)


def _laid_out(plan: Plan, quantization: Quantization | None) -> Plan:
    """Returns a plan, which knows its tensors and bindings, with its arrays and slabs.

    Raises:
        UsageError, UnsupportedConfig: as `with_quantization` does.
    """
    options, target, config = plan.options, plan.target, plan.config
    keeps = options.encoding == "keep"
    if target.quantized is None and (keeps or quantization):
        raise UsageError(
            f"the target {target.name} has no quantized parameters", hint='leave out `encoding="keep"` and `quantize=`'
        )
    wanted = [b for b in plan.bindings if keeps or _is_passthrough(b, quantization)]
    if wanted and target.squeezes_scales:
        raise UnsupportedConfig(
            f"{target.name} has scales of whole channels, not the scales of a release",
            hint='decode by `encoding="dequantize"`, or quantize to another type than the release has',
        )
    if plan.faults:
        return replace(plan, quantization=quantization)
    tensors, bindings, passthrough, faults = pass_through(plan.tensors, plan.bindings, wanted, target.part)
    arrays: dict[str, OutputArray] = {}
    slabs: list[Slab] = []
    encoders = quantization.encoders if quantization else {}
    for binding in bindings if not faults else ():
        new_arrays, new_slabs = cut_binding(tensors, binding, options, encoders, target)
        faults += [f"{array.name}  is made by two rows of the table" for array in new_arrays if array.name in arrays]
        arrays |= {array.name: array for array in new_arrays}
        slabs += new_slabs
    for name, found in quantization.found.items() if quantization and not faults else ():
        shape = found.shape
        arrays[name] = OutputArray(shape, np.dtype(np.float32), shape, shape, name, found.axes, (), buffer=True)
    if not faults:
        _check_forms(target, options, passthrough, arrays, {EXPERTS, PLACES, PERIODS, *config.layer_sets})
    return replace(
        plan,
        tensors=tensors,
        quantization=quantization,
        passthrough=passthrough,
        bindings=tuple(bindings),
        arrays=arrays,
        slabs=tuple(slabs),
        faults=tuple(faults),
    )


def _check_forms(
    target: Target,
    options: Options,
    passthrough: Mapping[str, Passthrough],
    arrays: Mapping[str, OutputArray],
    stacked: Collection[str],
) -> None:
    """Raises UsageError or UnsupportedConfig if the target does not read arrays in the form that they will have;
    `stacked`: as `_check_fp8` takes them."""
    if options.pathways:
        target.check_pathways({name: array.dtype.name for name, array in arrays.items()})
    if target.fp8_block:
        _check_fp8(target, passthrough, arrays, stacked)


def _check_fp8(
    target: Target, passthrough: Mapping[str, Passthrough], arrays: Mapping[str, OutputArray], stacked: Collection[str]
) -> None:
    """Raises UnsupportedConfig if a parameter that stays encoded has another form than the target's FP8 in blocks,
    besides the axes `stacked`."""
    wrong: dict[str, list[str]] = {}
    for name, kept in passthrough.items():
        array, block = arrays[name], target.fp8_block
        own = (
            [
                (size // group, size if size < block else size // block)
                for axis, size, group in zip(array.axes.split(), array.shape, kept.group_shape, strict=True)
                if axis not in stacked
            ]
            if "(" not in array.axes
            else []
        )
        if kept.scheme.qtype != "float8_e4m3fn" or not own or any(has != wants for has, wants in own):
            wrong.setdefault(f"{kept.scheme.qtype} in groups of {list(kept.group_shape)}", []).append(name)
    if wrong:
        raise UnsupportedConfig(
            f"{target.name} has FP8 with a scale for each block of {target.fp8_block} values along each axis",
            details=[f"{pattern}: {form}" for form, names in wrong.items() for pattern in collapse(names)],
            hint='decode by `encoding="dequantize"`',
        )


def _checked_table(source: Source, table: MappingTable, config: HasSizes, options: Options) -> MappingTable:
    """Returns the table, with stacked layers if these are wanted.

    Raises:
        UsageError, UnsupportedConfig, MappingError: as `make_plan` does.
    """
    if options.scan_layers and options.target == OWN_TARGET:
        if why := getattr(config, "unscannable", ""):
            raise UnsupportedConfig(
                f"`scan_layers=True` cannot stack the layers of {source.name}: {why}", hint="leave it out"
            )
        table = table.stack_layers(config)
    if options.layers is not None and any(PERIODS in (*loop, *stack) for loop, stack in map(row_indices, table)):
        raise UsageError(
            "`layers=` and layers that are stacked by periods exclude each other", hint="leave out one of them"
        )
    mtp = options.include_mtp
    if mtp and not config.layer_sets.get(MTP):
        raise UsageError(
            f"{source.name} has no layers that predict further tokens", hint="leave out `include_mtp=` or `speculate=`"
        )
    if mtp and options.layers is not None:
        raise UsageError("`include_mtp=` and `layers=` exclude each other", hint="leave out one of them")
    if (tensor_count := table.count(config, mtp)) > TENSORS_TO_LIST + 4 * len(source.tensors):
        raise MappingError(
            f"config.json asks for {tensor_count} tensors, and {source.name} has {len(source.tensors)}",
            hint="num_hidden_layers or the number of experts does not belong to these weights",
        )
    return table


def _coverage_faults(
    source: Source,
    tensors: Mapping[str, Tensor],
    bindings: list[Binding],
    expected: Mapping[str, Shape],
    unmapped: Sequence[str],
    copies: Mapping[str, str],
) -> list[str]:
    """Returns the mismatches between tensors and table, by pattern of names."""
    faults = [_describe(tensors, pattern, names, "has no row") for pattern, names in collapse(unmapped).items()]
    # What has a fault already is not missing too.
    missing = [name for name in expected if name not in tensors and name not in source.tensors]
    faults += [
        f"{pattern}{IS_MISSING} ({format_count(len(names), 'tensor')})" for pattern, names in collapse(missing).items()
    ]
    wrong = [n for n, shape in expected.items() if n in tensors and tensors[n].shape != shape]
    for pattern, names in collapse(wrong).items():
        faults.append(_describe(tensors, pattern, names, f"should be {list(expected[names[0]])} by config.json"))
    for copy, original in copies.items():
        if original in tensors and _stored_kind(tensors[copy]) != _stored_kind(tensors[original]):
            faults.append(f"{copy}  should be a copy of {original}, but has another shape or dtype")
    return faults + _dtype_faults(tensors, bindings)


def _strange_front(
    reader: Callable[[], ReleaseReader], why_ignored: Callable[[str], str | None], names: Sequence[str]
) -> list[str]:
    """The fault of a segment before all names without which all of them are in the table of a family, whose `reader` is
    made if it is needed."""
    front = names[0].partition(".")[0] + "." if names else ""
    if not front or not all(name.startswith(front) for name in names):
        return []
    speller = reader().speller
    plain = [name.removeprefix(front) for name in names]
    read = by_template(name for name in plain if not why_ignored(name))
    fits = all(speller.canonical(each) is not None for each in read)
    is_strange = not any(map(speller.canonical, by_template(names)))
    return [f"every name begins with {front!r}, and {FIT_WITHOUT}"] if fits and is_strange else []


def _with_carried(source: Source, family: str, table: MappingTable, config: Any, options: Options) -> Any:
    """Returns the config with the parts beside the text model, which are carried into safetensors: adapters change them
    too. Without those that tpuconv does not read."""
    own = get_family(family)
    if not (parts := own.parts_among(source.tensors)):
        return config
    try:
        return own.read_config(source.config, options.allow_config, source.tensors, table.returns, parts)
    except TpuconvError:
        return config


def _with_originals(
    tensors: dict[str, Tensor], copies: Mapping[str, str], expected: Collection[str]
) -> dict[str, Tensor]:
    """Returns the tensors with copies, which are not expected, in place of originals that are missing. Programs that
    save a shared matrix once keep the name that they meet first, which may be the head's."""
    found = {
        copy: original
        for copy, original in copies.items()
        if template(copy) == copy and copy in tensors and copy not in expected and original not in tensors
    }
    return {found.get(name, name): tensor for name, tensor in tensors.items()}


def _is_input_first(tensors: Mapping[str, Tensor], name: str) -> bool:
    tensor = tensors.get(name)
    return tensor is not None and tensor.scheme is not None and tensor.scheme.input_first


def _original(name: str, copies: Mapping[str, str], expected: Mapping[str, Shape]) -> str | None:
    """Returns the original of a copy. It may be a copy of a copy, as is the head of a tied model."""
    original = copies.get(name)
    while original is not None and original not in expected:
        original = copies.get(original)
    return original


ZERO_BIASES = "biases that the model does not have, as some programs write them: all must be 0"


def _zero_biases(
    tensors: Mapping[str, Tensor], rows: Collection[str], why_ignored: Callable[[str], str | None]
) -> dict[str, str]:
    """Returns the biases of encoded matrices which have rows without biases, each with `ZEROS`: programs of GPTQ write
    them."""
    encoded = {name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.scheme and name in rows}
    biases = (f"{module}.bias" for module in encoded)
    found = [name for name in biases if name in tensors and name not in rows and not why_ignored(name)]
    return {name: ZEROS for name in sorted(found) if len(tensors[name].shape) == 1 and not tensors[name].scheme}


def _is_passthrough(binding: Binding, quantization: Quantization | None) -> bool:
    return quantization is not None and all(name in quantization.passthrough for s in binding.dst for name in s.names)


def _cut_layers(table: MappingTable, config: HasSizes, layers: range | None) -> tuple[MappingTable, HasSizes]:
    """A table and a config of these layers alone: both have letters of layers."""
    if layers is None:
        return table, config
    have = config.layer_sets[LAYERS]
    if not layers or layers.step != 1:
        raise UsageError(f"layers cannot be {layers}", hint="give a range of at least one layer with a step of 1")
    if layers[0] not in have or layers[-1] not in have:
        wanted = f"{layers.start}-{layers.stop - 1}"
        raise UsageError(
            f"`layers=` {wanted} is not a part of the model's layers {have[0]}-{have[-1]}",
            hint=f"give some of the layers {have[0]}-{have[-1]}",
        )
    cut, apart = (
        {x: [i for i in numbers if i in layers] for x, numbers in sets.items()}
        for sets in (sets_of_layers(config), table.layer_sets)
    )
    return replace(table, layer_sets=apart), WithSizes(config, config.sizes, {**config.layer_sets, **cut})


def _stored_kind(tensor: Tensor) -> tuple[str, Shape, bool]:
    return tensor.values.dtype, tensor.shape, tensor.scheme is None


def _describe(tensors: Mapping[str, Tensor], pattern: str, names: list[str], fault: str) -> str:
    tensor = tensors[names[0]]
    count = format_count(len(names), "tensor")
    return f"{pattern}  {tensor.values.dtype} {list(tensor.shape)} ({count}) {fault}"


def _dtype_faults(tensors: Mapping[str, Tensor], bindings: list[Binding]) -> list[str]:
    not_float, mixed = [], []
    for binding in bindings:
        sources = [tensors[n] for stack in binding.src for n in stack.names if n in tensors]
        # Buffers are never cast: they may be tables of numbers, such as DeepSeek V4's of experts by token id.
        known = (*FLOAT_DTYPES, *INTEGER_DTYPES) if binding.row.buffer else FLOAT_DTYPES
        not_float += [tensor.name for tensor in sources if tensor.dtype.name not in known]
        if len({(tensor.values.dtype, tensor.scheme is None) for tensor in sources}) > 1:
            mixed.append(sources[0].name)
    return [
        _describe(tensors, pattern, names, "is not a plain float, and config.json does not say how it is encoded")
        for pattern, names in collapse(not_float).items()
    ] + [f"{pattern}  {OTHER_DTYPE}" for pattern in collapse(mixed)]
