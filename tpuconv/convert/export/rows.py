"""The rows of an export: the rows of the table inverted, and cut so that each makes one tensor of the source."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.convert.export.array_source import ArraySource
from tpuconv.convert.export.serving.caches import cache_scales_of
from tpuconv.convert.export.serving.description import describe_encoding
from tpuconv.convert.export.serving.formats import WeightGroup
from tpuconv.convert.export.serving.rows import quantized_rows
from tpuconv.convert.export.tensor import ExportRow, ExportTensor
from tpuconv.convert.plan import sizes
from tpuconv.encodings.passthrough import pack, pack_zero_points, separate_scales, unrefine
from tpuconv.encodings.passthrough_rows import Stored, split
from tpuconv.encodings.scheme import Scheme
from tpuconv.encodings.schemes import schemes
from tpuconv.errors import CorruptOutput, UsageError
from tpuconv.notation.arithmetic import WholeNumbers
from tpuconv.notation.layout import Axis, Ranges, Shape, lead, sliceable
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import EXPERTS, Binding, MappingTable, Stack
from tpuconv.sources.config import encoding_of
from tpuconv.sources.headers import CODES
from tpuconv.targets.registry import get_target

LOOKED_UP = ("embedding", "positions", "table", "ends")
"""The last parts of the names of parameters whose rows are looked up."""


@dataclass(frozen=True)
class ExportPiece:
    """Rows of the same parameters, which are made together, slab by slab.

    Attributes:
        rows: of complete tensors.
        slabs: the ranges of letters that a slab has: of those that the arrays have and the rows do not, since they are
            made one expert at a time, or one layer; and of `letter`.
        letter: the letter that leads the first axis of all tensors, if there are several slabs, which are parts of them
            one after the other.
    """

    rows: tuple[ExportRow, ...]
    slabs: tuple[Ranges, ...]
    letter: str = ""

    @property
    def tensors(self) -> list[ExportTensor]:
        """The tensors that are made, in this order."""
        return [tensor for row in self.rows for tensor in row.tensors]

    @property
    def nbytes(self) -> int:
        """The number of bytes of what is made in a slab, on average."""
        return sum(tensor.nbytes for tensor in self.tensors) // len(self.slabs)


def export_pieces(
    arrays: ArraySource, table: MappingTable, config: HasSizes, beside: Sequence[str], scheme: str | None
) -> tuple[list[ExportPiece], dict[str, Any] | None]:
    """Returns all pieces, and the description for config.json of what is quantized.

    Args:
        arrays: what is exported.
        table: from released tensors to the arrays, before layers are stacked.
        config: the family's, with the letters of the table.
        beside: modules that the export has besides.
        scheme: in which quantized parameters are written; None for those that are encoded as they were released.

    Raises:
        UsageError: only a part of a model is there, no format of servers holds what is quantized, or scales of the
            source are lost.
        CorruptOutput: an array is missing.
    """
    manifest = arrays.manifest
    manifest.check_complete()
    pieces: list[ExportPiece] = []
    groups: dict[WeightGroup, list[str]] = {}
    plain = list(beside)
    target = get_target(manifest.target)
    known = {scheme.title: scheme for scheme in schemes(encoding_of(arrays.config))}
    quantized = manifest.quantization["parameters"] if manifest.quantization and scheme else {}
    is_stacked = manifest.scan_layers and target.trees is None  # tables of trees have their stacks already
    layer_table = table.stack_layers(config) if is_stacked else table
    for whole in layer_table.bind(config, manifest.include_mtp):
        if whole.row.is_of_ones:
            continue  # what was trained of them is multiplied into the matrices behind them
        is_quantized = any(stack.names[0] in quantized for stack in whole.dst)
        if not is_quantized:
            plain += _linear_modules(whole)
        cuts = list(_cut(whole))
        if is_quantized and scheme:
            kept = known.get(quantized.get(whole.dst[0].names[0], {}).get("kept", ""))
            found = quantized_rows(manifest, cuts, target, scheme, kept)
            groups.setdefault(found.group, []).extend(found.modules)
            made = found.cuts
        else:
            made = [tuple(ExportRow(*row) for row in _plain_rows(arrays, cut, known, target.part)) for cut, _ in cuts]
        _check_shapes(manifest, made[0], cuts[0][1])
        pieces += [_in_slabs(manifest, cut, rows, ranges) for (cut, ranges), rows in zip(cuts, made, strict=True)]
    encoding = describe_encoding(scheme, groups, plain, cache_scales_of(manifest)) if quantized and scheme else None
    return _by_layer(pieces), encoding


def _by_layer(pieces: Sequence[ExportPiece]) -> list[ExportPiece]:
    """Returns the pieces layer by layer, as releases have them, where the table has row by row: what a file is made of
    lies together in the source, and a server that loads a layer reads one file. What has no layer stays before or
    behind."""
    layers = [re.search(r"\.(\d+)\.", piece.tensors[0].name) for piece in pieces]
    first = next((i for i, found in enumerate(layers) if found), 0)
    keys = [int(found[1]) if found else -1 if i < first else math.inf for i, found in enumerate(layers)]
    return [pieces[i] for i in sorted(range(len(pieces)), key=lambda i: keys[i])]


def _cut(whole: Binding) -> Iterator[tuple[Binding, Ranges]]:
    """Yields the row for each source tensor alone, with its ranges of the letters on which the sources are stacked; the
    complete row if nothing is, or the parameters cannot be cut there."""
    letters = [axis.letter for axis in whole.layout.src[0][: whole.src[0].depth]]
    merged = any(axis.op and lead(axis) in letters for axes in whole.layout.dst for axis in axes)
    if not letters or merged or not all(sliceable(whole.layout, letter) for letter in letters):
        yield whole, {}
        return
    places = product(*(range(whole.sizes[letter]) for letter in letters))
    sizes = {**whole.sizes, **dict.fromkeys(letters, 1)}
    for number, place in enumerate(places):
        src = tuple(Stack((stack.names[number],), stack.depth) for stack in whole.src)
        yield replace(whole, sizes=sizes, src=src), {x: (i, i + 1) for x, i in zip(letters, place, strict=True)}


def _in_slabs(manifest: Manifest, binding: Binding, rows: tuple[ExportRow, ...], ranges: Ranges) -> ExportPiece:
    """Returns the piece of a row, in slabs along the first axis of its tensors if it is large. Where that is another
    axis of the arrays, slabs are whole files of these: parts of a file would be read again for each slab."""
    piece = ExportPiece(rows, (ranges,))
    nbytes = piece.nbytes
    held = nbytes - piece.tensors[0].nbytes  # until the last slab, since tensors are written one after the other
    is_sliced = all(tensor.sliced or tensor.fixed for tensor in piece.tensors)
    if nbytes <= sizes.SLAB_BYTES or held > nbytes // 2 or not is_sliced:
        return piece
    letter, *others = {lead(axes[stack.depth]) for axes, stack in zip(binding.layout.src, binding.src, strict=True)}
    if others or letter not in binding.sizes or not sliceable(binding.layout, letter):
        return piece
    count = binding.sizes[letter]
    least = math.lcm(*(_least_slab(manifest, row, letter, ranges, count) for row in rows))
    step = max(1, sizes.SLAB_BYTES * count // nbytes // least) * least
    if step >= count:
        return piece
    slabs = ({**ranges, letter: (start, min(start + step, count))} for start in range(0, count, step))
    return ExportPiece(rows, tuple(slabs), letter)


def _least_slab(manifest: Manifest, row: ExportRow, letter: str, ranges: Ranges, count: int) -> int:
    """Returns the number of places of a letter, of this size, of which slabs of a row are multiples: 1 if the letter
    leads the arrays, after the axes of the ranges, and else what a file of theirs has; all of them if an array cannot
    be cut there."""
    least = 1
    for name, axes in row.axes.items():
        repeats, stored = row.repeats.get(name), manifest.arrays[name]
        place = axes.index(Axis(letter)) if Axis(letter) in axes else None
        if place is None or row.inverse.sizes[letter] != count or (repeats and repeats[place] != 1):
            return count
        if any(lead(axis) not in ranges for axis in axes[:place]):
            least = math.lcm(least, (stored.shards or stored.chunks)[place])
    return least


def _linear_modules(binding: Binding) -> Iterator[str]:
    """Yields the modules of a row that servers multiply with: linear layers, but not embeddings, and the experts of a
    layer, which may be in one tensor. Our name tells them apart: `embed` is in the names of linear layers too."""
    is_table = all(name.rpartition(".")[2] in LOOKED_UP for stack in binding.dst for name in stack.names)
    for stack, axes in zip(binding.src, binding.layout.src, strict=True):
        if len(axes) == stack.depth:
            continue  # a number, or one for each layer
        first, *others = axes[stack.depth :]
        is_of_experts = lead(first) == EXPERTS and (first.op or len(others) > 1)
        for name in stack.names:
            module = name.removesuffix(".weight")
            if is_of_experts:
                front, experts, _ = module.partition(".experts.")
                yield f"{front if experts else front.rpartition('.')[0]}.experts"
            elif len(others) == 1 and name.endswith(".weight") and not is_table:
                yield module


def _plain_rows(
    source: ArraySource, binding: Binding, known: Mapping[str, Scheme], part: Callable[[str, str], str]
) -> Iterator[tuple[Binding, list[ExportTensor]]]:
    """Yields the inverse rows of parameters that are plain, or encoded as they were released."""
    manifest = source.manifest
    if facts := manifest.passthrough.get(binding.dst[0].names[0]):
        scheme = known.get(facts["kept"])
        if scheme is None or len(facts["stored"]) != len(binding.src):
            raise CorruptOutput(
                f"{manifest.folder}: config.json and the manifest do not agree on how {binding.src[0].names[0]} "
                "was stored",
                hint="convert the checkpoint again",
            )
        if scheme.unwritten:
            raise UsageError(
                f"{manifest.folder} has {binding.src[0].names[0]} as {scheme.title}, which no export writes: a "
                f"checkpoint has {scheme.unwritten}",
                hint='convert the release with `encoding="dequantize"`, and export that',
            )
        stored = [Stored.from_json(each) for each in facts["stored"]]
        yield from _passthrough_rows(source, binding, scheme, stored, part)
    else:
        if (name := binding.dst[0].names[0]) not in manifest.arrays:
            raise _no_array(manifest, name, binding.dst_shapes()[name])
        dtype = CODES[manifest.arrays[name].dtype]
        shapes = binding.src_shapes()
        is_float = isinstance(binding.arithmetic.get(name), WholeNumbers) and dtype == "F32"
        dtype, make = ("I64", _whole_numbers) if is_float else (dtype, _same)
        tensors = [ExportTensor(name, dtype, shape, name, make, sliced=True) for name, shape in shapes.items()]
        yield binding.inverse, tensors


def _check_shapes(manifest: Manifest, rows: Sequence[ExportRow], ranges: Ranges) -> None:
    """Raises CorruptOutput if an array is missing or has another shape than rows need that have one of each of the
    letters in `ranges`."""
    for row in rows:
        for axes, stack, shape in zip(
            row.inverse.layout.src, row.inverse.src, row.inverse.layout.src_shapes(row.inverse.sizes), strict=True
        ):
            name = stack.names[0]
            repeats = row.repeats.get(name, (1,) * len(shape))
            found = manifest.arrays[name].shape if name in manifest.arrays else ()
            needed = tuple(n // count for n, count in zip(shape, repeats, strict=True))
            cut = [i for i, axis in enumerate(axes) if lead(axis) in ranges]
            if len(found) != len(needed) or any(
                n * count != m
                for i, (n, count, m) in enumerate(zip(found, repeats, shape, strict=True))
                if i not in cut
            ):
                raise _no_array(manifest, name, needed)


def _no_array(manifest: Manifest, name: str, shape: Shape) -> CorruptOutput:
    return CorruptOutput(
        f"{manifest.folder} has no array {name} of shape {list(shape)}",
        hint="it was made by another version of tpuconv: convert it again",
    )


def _same(array: np.ndarray) -> np.ndarray:
    return array


def _whole_numbers(array: np.ndarray) -> np.ndarray:
    return array.astype(np.int64)


def _passthrough_rows(
    source: ArraySource, binding: Binding, scheme: Scheme, stored: list[Stored], part: Callable[[str, str], str]
) -> Iterator[tuple[Binding, list[ExportTensor]]]:
    binding = binding.swapped(lambda _: scheme.input_first)
    parts = split(binding, scheme, [each.shape for each in stored], part)
    qvalues: list[ExportTensor] = []
    scales: list[ExportTensor] = []
    zero_points: list[ExportTensor] = []
    shapes = parts.qvalues.src_shapes()
    for qvalue_stack, scale_stack, refine, stored_scales in zip(
        parts.qvalues.src, parts.scales.src, parts.refine, stored, strict=True
    ):
        for name, scale_name in zip(qvalue_stack.names, scale_stack.names, strict=True):
            shape, base = shapes[name], name.removesuffix(scheme.values)
            qvalues.append(
                ExportTensor(
                    *(name, scheme.dtype, scheme.stored_shape(shape), name),
                    partial(pack, scheme.for_shape(shape)),
                    sliced=len(shape) > 2 and scheme.affine is None,
                )
            )
            for suffix, dtype in zip(scheme.described, stored_scales.extra, strict=False):
                value = scheme.expected(suffix, shape, stored_scales.shape, dtype)
                qvalues.append(ExportTensor.constant(base + suffix, dtype, value, name))
            if scheme.tensor_scale:
                scales += _two_scales(source, scheme, base, scale_name, stored_scales, refine)
            else:
                dtype, grid = stored_scales.dtype, stored_scales.shape
                sliced = len(grid) > 2 and refine[0] == 1
                shape = (-1, *grid[1:]) if sliced else grid
                make = partial(unrefine, refine=refine, dtype=dtype, shape=shape, factor=scheme.factor)
                scales.append(ExportTensor(scale_name, dtype, grid, scale_name, make, sliced))
            if parts.zero_points is not None:
                affine = scheme.affine
                assert affine is not None
                zeros_shape = affine.zero_words.stored_shape(stored_scales.shape)
                zeros_name = base + affine.zero_points
                zero_points.append(
                    ExportTensor(
                        *(zeros_name, "I32", zeros_shape, zeros_name),
                        lambda x, affine=affine, refine=refine: pack_zero_points(affine, x, refine),  # type: ignore[misc]
                    )
                )
    yield parts.qvalues.inverse, qvalues
    yield parts.scales.inverse, scales
    if parts.zero_points is not None:
        yield parts.zero_points.inverse, zero_points


def _two_scales(
    source: ArraySource, scheme: Scheme, base: str, scale_name: str, stored: Stored, refine: Sequence[int]
) -> Iterator[ExportTensor]:
    """Separates the scales of blocks and the scale of the tensor; a checkpoint has their products. Servers join
    matrices under one scale of the tensor, so the source's scale must come back, not another with the same products."""
    tensor_scale_name = base + scheme.tensor_scale

    def separated(products: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = separate_scales(
            unrefine(products, refine, "F32", stored.shape),
            divided=scheme.divided,
            tensor_scale=source.tensor_scale(tensor_scale_name),
        )
        if found is None:
            raise CorruptOutput(
                f"the scales of {base} are not products of scales of blocks and one of the tensor",
                hint="convert the checkpoint again",
            )
        return found

    yield ExportTensor(scale_name, stored.dtype, stored.shape, scale_name, lambda x: separated(x)[0])
    shape = (1,) if scheme.divided else ()  # as compressed-tensors and ModelOpt write it
    yield ExportTensor(tensor_scale_name, "F32", shape, scale_name, lambda x: separated(x)[1].reshape(shape))
