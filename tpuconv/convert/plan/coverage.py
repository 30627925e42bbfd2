"""Planning: every tensor of the source is used or skipped exactly once, every parameter of the table is produced once,
and shapes and dtypes fit. Faults are collected and raised together, before a byte of the weights is read."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tpuconv.convert.plan.adapters import changes_on_disk, of_shared_matrices, of_tied_head, without_ignored
from tpuconv.convert.plan.arrays import with_arrays
from tpuconv.convert.plan.options import Options
from tpuconv.convert.plan.types import (
    FIT_WITHOUT,
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    IS_MISSING,
    OTHER_DTYPE,
    ZEROS,
    Plan,
    Skip,
)
from tpuconv.encodings.adapted import BY_ADAPTER, Adapted, adapt
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.reshaped import recut, shaped
from tpuconv.encodings.tensors import decode_names, is_encoded, unused_reason
from tpuconv.encodings.unread import unread_keys
from tpuconv.errors import MappingError, TpuconvError, UnsupportedConfig, UsageError
from tpuconv.models.common.ignored import IgnoredKey
from tpuconv.models.common.saved import INPUTS_FIRST
from tpuconv.models.registry import Family, get_family
from tpuconv.names import OWN_TARGET, collapse
from tpuconv.notation.layout import Shape
from tpuconv.notation.sizes import MTP, HasSizes, WithSizes, sets_of_layers
from tpuconv.notation.spelling import by_template, template
from tpuconv.notation.stand_ins import stand_ins
from tpuconv.notation.table import LAYERS, PERIODS, Binding, MappingTable, row_indices
from tpuconv.sources.config import ENCODING_KEYS, MLX_METHOD
from tpuconv.sources.source import Source
from tpuconv.targets.registry import get_target
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
    target = get_target(options.target)
    table = _checked_table(source, table, config, options)
    decoded = decoded or decode_names(source.tensors, source.encoding, any_scales=options.allow_nonfinite)
    tensors, faults = dict(decoded[0]), list(decoded[1])
    encoded = is_encoded(tensors, faults)
    _check_kept(source, options, encoded=encoded)
    ignored_config = (*ignored_config, *_ignored_of_encoding(source, encoded=encoded))
    rows = _Rows.of(table, config, options, tensors)
    tensors = rows.shaped(tensors)
    elsewhere: Mapping[str, list[str]] = {}
    if options.adapters:
        tensors, elsewhere, of_adapters = _adapted(source, family, rows, tensors, options)
        faults += of_adapters
    use = _use(rows, tensors, source, options, elsewhere, carries=target.is_safetensors)
    faults += [f"{p}  is changed by an adapter, and not converted" for p in collapse(use.lost)]
    is_found = not rows.expected.keys().isdisjoint(tensors)  # beside a copy with a front, such as an average of weights
    front = [] if is_found else _strange_front(family, rows, use.unmapped)
    faults += front or _coverage_faults(source, tensors, rows, use)
    covered = Plan(
        source=source,
        tensors=tensors,
        family=family,
        table=table,
        options=options,
        bindings=rows.bindings,
        skipped=tuple(use.skips),
        copies=use.copies,
        unmapped=tuple(use.unmapped),
        faults=tuple(faults),
        ignored_config=ignored_config,
        target=target,
        config=config,
        empty=tuple(f"{target.root}{name}" for name, is_empty in target.empty.items() if is_empty(config)),
    )
    return with_arrays(covered)


def _check_kept(source: Source, options: Options, *, encoded: bool) -> None:
    """Raises UsageError if weights are to stay encoded that are not, or that an adapter changes."""
    if options.encoding != "keep":
        return
    if options.adapters:
        raise UsageError("an adapter changes weights, so they cannot stay encoded", hint='leave out `encoding="keep"`')
    if not encoded:
        raise UsageError(
            f"{source.name} is not encoded: there are no quantized values and scales to keep",
            hint="leave `encoding=` out",
        )
    if source.encoding is not None and source.encoding.get("quant_method") == MLX_METHOD:
        raise UsageError(
            "weights that MLX encoded cannot stay encoded: embeddings are among them, and groups have offsets that are "
            "no zero points",
            hint="leave `encoding=` out; or quantize them again with `quantize=`",
        )


def _ignored_of_encoding(source: Source, *, encoded: bool) -> tuple[IgnoredKey, ...]:
    """Returns the keys of config.json about encoded weights that are not read."""
    if source.encoding is None:
        return ()
    name = ENCODING_KEYS[0]
    if not encoded:
        warning = "transformers may quantize the weights when it loads them"
        return (IgnoredKey(name, dict(source.encoding), "no tensor is stored as it says", warning),)
    reason, warning = f"not read by tpuconv for {source.encoding.get('quant_method')}", "this may change the weights"
    return tuple(IgnoredKey(f"{name}.{key}", x, reason, warning) for key, x in unread_keys(source.encoding).items())


@dataclass(frozen=True)
class _Rows:
    """The rows of a table for the tensors of a model.

    Attributes:
        table, config: of the model, with all layers.
        bindings: the rows of the layers that are converted, with the names of their tensors.
        expected: the shapes of these tensors, by name.
        everywhere: the names of the tensors of all layers.
        copies: for each tensor that may be a copy, its original.
        others: for each tensor that is missing and has a stand-in, that.
        why_ignored: gives the reason why a tensor is not converted; None for others.
        regrouped: the names of tensors whose values are divided in another way than the rows have it.
    """

    table: MappingTable
    config: HasSizes
    bindings: tuple[Binding, ...]
    expected: Mapping[str, Shape]
    everywhere: Collection[str]
    copies: Mapping[str, str]
    others: Mapping[str, str]
    why_ignored: Callable[[str], str | None]
    regrouped: Sequence[tuple[str, ...]]

    @classmethod
    def of(cls, table: MappingTable, config: HasSizes, options: Options, tensors: Mapping[str, Tensor]) -> "_Rows":
        """Returns the rows of a table for tensors, by name on disk."""
        mtp = options.include_mtp
        cut_table, cut_config = _cut_layers(table, config, options.layers)
        others = {name: other for name, other in stand_ins(cut_table, cut_config).items() if name not in tensors}

        def is_input_first(name: str) -> bool:
            tensor = tensors.get(others.get(name, name))
            return tensor is not None and tensor.scheme is not None and tensor.scheme.input_first

        bindings = [binding.swapped(is_input_first) for binding in cut_table.bind(cut_config, mtp)]
        expected = {name: shape for binding in bindings for name, shape in binding.src_shapes().items()}
        everywhere = {name for b in table.bind(config) for name in b.src_shapes()} if options.layers else set(expected)
        return cls(
            table=table,
            config=config,
            bindings=tuple(bindings),
            expected=expected,
            everywhere=everywhere,
            copies=table.copies_of(config, mtp),
            others=others,
            why_ignored=table.ignored(config, mtp),
            regrouped=tuple(table.recut_groups(config, mtp)),
        )

    def with_others(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors with the stand-ins of missing ones."""
        return {**tensors, **{name: tensors[other] for name, other in self.others.items() if other in tensors}}

    def shaped(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns tensors in the shapes of the rows, with stand-ins, and with copies in place of originals that are
        missing."""
        tensors = _with_originals(self.with_others(tensors), self.copies, self.everywhere)
        return recut(shaped(tensors, self.expected), self.expected, self.regrouped)

    def original(self, name: str) -> str | None:
        """Returns the original of a copy. It may be a copy of a copy, as is the head of a tied model."""
        original = self.copies.get(name)
        while original is not None and original not in self.expected:
            original = self.copies.get(original)
        return original


def _adapted(
    source: Source, family: str, rows: _Rows, tensors: Mapping[str, Tensor], options: Options
) -> tuple[dict[str, Tensor], Mapping[str, list[str]], list[str]]:
    """Returns tensors with the changes of adapters; the names of changed tensors that are not converted, by reason; and
    the faults."""
    table, config, known = rows.table, rows.config, get_family(family)
    is_whole = get_target(options.target).is_safetensors
    whole = _with_carried(source, known, table, config, options) if is_whole else config
    reader = known.release_reader(table.returns, getattr(whole, "parts", {}))
    release = table.release if whole is config else reader.read(source.tensors, whole).release
    inputs_first = family in INPUTS_FIRST
    placed = changes_on_disk(options.adapters, reader, release, tensors, whole, inputs_first=inputs_first)
    shared, apart = of_shared_matrices(placed, rows.copies)
    heads = {copy: x for copy, x in rows.copies.items() if copy not in rows.expected and template(copy) == copy}
    tied, untied = of_tied_head(shared, heads)
    placed_changes, elsewhere = without_ignored(tied, tensors, rows.why_ignored)
    input_first = {name for b in rows.bindings if b.row.input_first for name in b.src_shapes()}
    adapted, misfits = adapt(tensors, placed_changes, input_first)
    return rows.with_others(adapted), elsewhere, [*apart, *untied, *misfits]


class _Use(NamedTuple):
    """How tensors are used.

    Attributes:
        copies: the tensors that are not converted since others have their values, with these; see `Plan.copies`.
        skips: the tensors that are not converted, and why.
        unmapped: the tensors without a row.
        lost: the tensors that an adapter changes, and that are not converted.
    """

    copies: Mapping[str, str]
    skips: list[Skip]
    unmapped: list[str]
    lost: list[str]


def _use(
    rows: _Rows,
    tensors: Mapping[str, Tensor],
    source: Source,
    options: Options,
    elsewhere: Mapping[str, list[str]],
    *,
    carries: bool,
) -> _Use:
    """Returns how the tensors are used. `elsewhere` has the names that an adapter changes and that are not
    converted, by reason; a target that `carries` tensors beside the converted ones would lose them."""
    everywhere = rows.everywhere
    found = {name: original for name in tensors if name not in everywhere and (original := rows.original(name))}
    copies = found | _zero_biases(tensors, everywhere, rows.why_ignored)
    skipped = {why + BY_ADAPTER: list(names) for why, names in elsewhere.items()}
    unmapped: list[str] = []
    lost = [name for names in elsewhere.values() for name in names if carries]
    for name, tensor in tensors.items():
        if name in rows.expected:
            continue
        reason = _why_not_converted(name, rows, source, options, copies)
        if reason is None:
            unmapped.append(name)
            continue
        if isinstance(tensor, Adapted) and name not in everywhere:
            lost += [name] if name in copies or (carries and tensor.scheme is not None) else []
            reason += BY_ADAPTER
        skipped.setdefault(reason, []).extend(info.name for info in tensor.stored)
    skips = [Skip(p, len(names), why) for why, all_names in skipped.items() for p, names in collapse(all_names).items()]
    return _Use(copies, skips, unmapped, lost)


def _why_not_converted(
    name: str, rows: _Rows, source: Source, options: Options, copies: Mapping[str, str]
) -> str | None:
    """Returns why a tensor is not converted; None if nothing says so."""
    if name in rows.everywhere:
        assert options.layers is not None
        return f"outside `layers=` {options.layers.start}-{options.layers.stop - 1}"
    if name in copies:
        return f"a copy of {copies[name]}" if copies[name] else ZERO_BIASES
    return rows.why_ignored(name) or (unused_reason(name) if source.encoding else None)


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


def _coverage_faults(source: Source, tensors: Mapping[str, Tensor], rows: _Rows, use: _Use) -> list[str]:
    """Returns the mismatches between tensors and table, by pattern of names."""
    expected = rows.expected
    faults = [_describe(tensors, pattern, names, "has no row") for pattern, names in collapse(use.unmapped).items()]
    # What has a fault already is not missing too.
    missing = [name for name in expected if name not in tensors and name not in source.tensors]
    faults += [
        f"{pattern}{IS_MISSING} ({format_count(len(names), 'tensor')})" for pattern, names in collapse(missing).items()
    ]
    wrong = [n for n, shape in expected.items() if n in tensors and tensors[n].shape != shape]
    for pattern, names in collapse(wrong).items():
        faults.append(_describe(tensors, pattern, names, f"should be {list(expected[names[0]])} by config.json"))
    for copy, original in use.copies.items():
        if original in tensors and _stored_kind(tensors[copy]) != _stored_kind(tensors[original]):
            faults.append(f"{copy}  should be a copy of {original}, but has another shape or dtype")
    return faults + _dtype_faults(tensors, rows.bindings)


def _strange_front(family: str, rows: _Rows, names: Sequence[str]) -> list[str]:
    """The fault of a segment before all names without which all of them are in the table of a family."""
    front = names[0].partition(".")[0] + "." if names else ""
    if not front or not all(name.startswith(front) for name in names):
        return []
    speller = get_family(family).release_reader(rows.table.returns, getattr(rows.config, "parts", {})).speller
    plain = [name.removeprefix(front) for name in names]
    read = by_template(name for name in plain if not rows.why_ignored(name))
    fits = all(speller.canonical(each) is not None for each in read)
    is_strange = not any(map(speller.canonical, by_template(names)))
    return [f"every name begins with {front!r}, and {FIT_WITHOUT}"] if fits and is_strange else []


def _with_carried(source: Source, family: Family, table: MappingTable, config: Any, options: Options) -> Any:
    """Returns the config with the parts beside the text model, which are carried into safetensors: adapters change them
    too. Without those that tpuconv does not read."""
    if not (parts := family.parts_among(source.tensors)):
        return config
    try:
        return family.read_config(source.config, options.allow_config, source.tensors, table.returns, parts)
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


def _dtype_faults(tensors: Mapping[str, Tensor], bindings: Sequence[Binding]) -> list[str]:
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
