"""Quantized parameters as servers read them. Quantized values and scales equal the checkpoint, bit for bit.

A scale of the checkpoint that stands for several groups of the format is repeated. What a format cannot hold is an
error that names the rule to change.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import Manifest
from tpuconv.checkpoint.reader import read_array
from tpuconv.convert.export.serving.formats import FORMATS, Format, Packing, WeightGroup, type_of
from tpuconv.convert.export.tensor import ExportRow, ExportTensor
from tpuconv.encodings.awq_gptq import AWQ_ORDER
from tpuconv.encodings.passthrough import exponents, pack_halves
from tpuconv.encodings.scheme import BY_SCALES, Blocks, Scheme
from tpuconv.encodings.words import Words
from tpuconv.errors import UsageError
from tpuconv.names import AUTO_NAME, INPUT_SCALE, QVALUE, SCALE, ZERO_POINT
from tpuconv.notation.layout import Ranges, Shape, scale_layout
from tpuconv.notation.table import EXPERTS, PLACES, Binding, Stack
from tpuconv.sources.headers import CODES, DTYPES
from tpuconv.targets.target import Target

WEIGHT = ".weight"
PACK_WORD, BITS_OF_HALVES = 32, 4
"""Bits of a word of packed integers."""
AWQ_WORDS = Words(4, 1, AWQ_ORDER)
MIDDLE = 8
"""The zero point of symmetric values in AWQ's words."""


@dataclass(frozen=True)
class QuantizedRows:
    """The cuts of a row whose parameters are quantized.

    Attributes:
        cuts: for each cut its inverse, from quantized values, from scales, and from zero points if there are any.
        group: the format of the tensors.
        modules: the names of the modules that have them.
    """

    cuts: Sequence[tuple[ExportRow, ...]]
    group: WeightGroup
    modules: Sequence[str]


@dataclass(frozen=True)
class _Matrix:
    """One tensor of a release that is quantized: its name and shape as the format stores it, how many of its rows and
    columns share a scale in the checkpoint, and how many in the format."""

    name: str
    shape: Shape
    blocks: Shape
    steps: Shape

    @property
    def base(self) -> str:
        """The name of the module."""
        return self.name.removesuffix(WEIGHT)

    @property
    def has_scales_of_rows(self) -> bool:
        """True if no scale is for several rows, here or as it is stored; experts are rows too."""
        return len(self.shape) > 2 or self.blocks[0] == self.steps[0] == 1

    @property
    def grid(self) -> Shape:
        """The shape of the stored scales."""
        *stacked, rows, columns = self.shape
        return (*stacked, -(-rows // self.steps[0]), -(-columns // self.steps[1]))


class _Parameters:
    """The parameters of a row, and what the manifest says about their quantization."""

    def __init__(self, manifest: Manifest, binding: Binding, target: Target, scheme: str, released: Scheme | None):
        assert manifest.quantization is not None
        assert target.quantized is not None
        self.released = released
        self.scheme, self.names = scheme, [stack.names[0] for stack in binding.dst]
        self.is_one_pass = target.is_safetensors
        self.is_auto = manifest.quantization.get("name", "").startswith(AUTO_NAME)
        self.facts: list[Any] = [manifest.quantization["parameters"].get(name) for name in self.names]
        rules = manifest.quantization.get("rules", [])
        kinds = [each and (type_of(each), each.get("kept"), _settings(rules, each)) for each in self.facts]
        if None in kinds or any(kind != kinds[0] for kind in kinds):
            raise self.refused("are joined in one tensor, and not quantized alike")
        self.rule = kinds[0][-1]
        suffix = ZERO_POINT[1:]
        self.has_zero_points = suffix in target.quantized and any(
            target.part(name, suffix) in manifest.arrays for name in self.names
        )

    @property
    def tiles(self) -> list[Any]:
        """The number of elements that share a scale, along each axis of each parameter."""
        return [each["tiles"] for each in self.facts]

    @property
    def tile_size(self) -> int:
        """The number of inputs that share a scale by the rule or the release; 0 if neither names one."""
        if self.released:
            rows, columns = self.released.blocks
            return columns or 0 if rows == 1 else 0
        tile = self.rule.get("tile_size")
        return tile if isinstance(tile, int) else 0

    @property
    def block(self) -> int:
        """The numbers of inputs and of outputs that share a scale by the rule; 0 if it has no blocks. Matrices that
        have fewer are one block."""
        return self.tile_size if self.rule.get("tile_axes") == "block" else 0

    @property
    def format(self) -> Format:
        """The format of the parameters' type.

        Raises:
            UsageError: the scheme has none.
        """
        own, act = self.facts[0]["qtype"], self.act_qtype
        kinds = (type_of(self.facts[0]), own)
        qtype = next((kind for kind in kinds if (kind, act is not None) in FORMATS[self.scheme]), own)
        form = FORMATS[self.scheme].get((qtype, act is not None))
        if form is None or act not in (None, qtype):
            how = f"{qtype} with activations in {act}" if act else qtype
            anywhere = any((qtype, act is not None) in formats for formats in FORMATS.values()) and act in (None, qtype)
            if anywhere:
                raise self.refused(f"are {how}: no format of {self.scheme} has this", otherwise="leave out `scheme=`")
            raise self.refused(f"are {how}: no format of servers has this")
        if self.has_zero_points and not form.has_zero_points:
            raise self.refused(f"have zero points, which {form.name or form.scheme} does not have")
        if self.is_static and not form.has_input_scale:
            raise self.refused(f"have static scales of activations, which {form.name or form.scheme} does not have")
        return form

    @property
    def act_qtype(self) -> str | None:
        """The type to which inputs are rounded: by the rule, or as in the release of parameters that stay encoded.
        None if they are not."""
        if self.released and self.released.rounds_inputs:
            return self.released.qtype
        return self.rule.get("act_qtype")

    @property
    def is_static(self) -> bool:
        """True if their inputs have static scales."""
        return bool(self.rule.get("act_static_scale"))

    def input_scales(self, manifest: Manifest) -> np.ndarray:
        """Returns the static scale of the input of each layer, float32 [L]; [1] if layers are not stacked.

        Raises:
            UsageError: joined parameters have different ones.
        """
        first, *others = (
            read_array(manifest, name.rpartition(".")[0] + INPUT_SCALE, None).reshape(-1) for name in self.names
        )
        if not all(np.array_equal(first, other) for other in others):
            raise self.refused("are joined in one tensor, and have inputs of different static scales")
        return first

    def refused(self, why: str, otherwise: str = "") -> UsageError:
        """Returns the error that says why the parameters cannot be exported, and which rule to change. `otherwise`:
        what to do, if not to leave them plain."""
        rule = next((each.get("rule") for each in self.facts if each is not None), None)
        change = "" if rule is None else f"; or change rule {rule + 1} of the quantization config"
        if self.is_auto:
            change = "; or quantize by a config without a rule for them: auto:BITS has rules for all products"
        plain = (
            "leave out `quantize=`" if self.is_one_pass else "export the checkpoint that this one was quantized from"
        )
        return UsageError(
            f"{' and '.join(self.names)} cannot be exported as quantized safetensors: they {why}",
            hint=f"{otherwise or plain}{change}",
        )


def _settings(rules: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the rule of a parameter says, except which modules it is for; {} if it has no rule."""
    rule = rules[facts["rule"]] if "rule" in facts else {}
    return {key: value for key, value in rule.items() if key not in ("module_path", "op_names")}


def quantized_rows(
    manifest: Manifest,
    cuts: Sequence[tuple[Binding, Ranges]],
    target: Target,
    scheme: str,
    released: Scheme | None,
) -> QuantizedRows:
    """Returns the tensors of a row whose parameters are quantized.

    Args:
        manifest: of the checkpoint.
        cuts: the row, from released tensors to parameters, for each layer or expert that is made alone, with its
            ranges. They differ in names only.
        target: what the checkpoint is for, which names the arrays of a parameter.
        scheme: one of `FORMATS`.
        released: the scheme of the release, if the parameters stay encoded. Where a matrix is divided within one of its
            blocks, the checkpoint has smaller ones.

    Raises:
        UsageError: the scheme has no format that holds it.
    """
    first, _ = cuts[0]
    parameters = _Parameters(manifest, first, target, scheme, released)
    form = parameters.format
    _check_sources(parameters, form, first)
    layout = first.swapped(lambda _: form.input_first).layout.inverse
    follow = scale_layout(layout, first.sizes, parameters.tiles)
    kinds = []
    for stack, whole, blocks in zip(first.src, layout.dst_shapes(first.sizes), follow.dst_blocks, strict=True):
        shape = whole[stack.depth :]
        own = blocks[stack.depth :][-2:] if len(shape) > 1 else (1, blocks[-1])
        steps = _steps(parameters, form, own, shape[-2:], released.blocks if released else BY_SCALES)
        kinds.append(partial(_Matrix, shape=shape, blocks=own, steps=steps))
    groups = {_group(parameters, form, kind("")) for kind in kinds}
    if len(groups) > 1:
        raise parameters.refused("have groups of several sizes")
    (group,) = groups
    qvalues, scales, *zeros = (
        _parts(first.dst, part, target) for part in (QVALUE, SCALE, *([ZERO_POINT] if group.asymmetric else []))
    )
    repeats = [
        {stack.names[0]: n[stack.depth :] for stack, n in zip(stacks, follow.refine, strict=True)}
        for stacks in (scales, *zeros)
    ]
    scale_dtype = _scale_dtype(parameters, form, manifest.arrays[scales[0].names[0]].dtype)
    input_scales = parameters.input_scales(manifest) if parameters.is_static else None
    out, modules = [], []
    for cut, ranges in cuts:
        matrices = [kind(name) for kind, stack in zip(kinds, cut.src, strict=True) for name in stack.names]
        modules += [matrix.base for matrix in matrices]
        of_values = [tensor for matrix in matrices for tensor in _values(form, matrix, asymmetric=group.asymmetric)]
        of_scales = [tensor for matrix in matrices for tensor in _scales(parameters, form, matrix, scale_dtype)]
        if input_scales is not None:
            of_scales += _input_scales(input_scales, cut, matrices, ranges)
        of_zeros = [[_zero_points(form, matrix) for matrix in matrices] for _ in zeros]
        inverse = partial(Binding, cut.row, layout, dst=cut.src)
        rows = [ExportRow(inverse(cut.sizes, qvalues), of_values)]
        for stacks, tensors, repeated in zip((scales, *zeros), (of_scales, *of_zeros), repeats, strict=True):
            rows.append(ExportRow(inverse(follow.sizes, stacks), tensors, repeated))
        out.append(tuple(rows))
    return QuantizedRows(out, group, modules)


def _check_sources(parameters: _Parameters, form: Format, binding: Binding) -> None:
    """Raises UsageError if the format does not hold what the tensors of the release are."""
    name = binding.src[0].names[0]
    if form.is_of_experts == any(stack.names[0].endswith(WEIGHT) for stack in binding.src):
        kind = "stacked experts" if form.is_of_experts else "a linear layer's weight"
        raise parameters.refused(f"come from {name}, which is not {kind}")
    if binding.row.input_first:
        raise parameters.refused(f"come from {name}, which is a matrix [in, out], and servers read [out, in]")
    if not form.is_of_experts and any(len(shape) != 2 for shape in binding.src_shapes().values()):
        raise parameters.refused(f"come from {name}, which is a stack of matrices, and servers read one by one")


def _parts(stacks: tuple[Stack, ...], suffix: str, target: Target) -> tuple[Stack, ...]:
    return tuple(Stack(tuple(target.part(name, suffix[1:]) for name in stack.names), stack.depth) for stack in stacks)


def _group(parameters: _Parameters, form: Format, matrix: _Matrix) -> WeightGroup:
    whole = not (form.has_blocks and parameters.block)
    # A row of one group has the format of rows with several: servers join such matrices.
    tile = parameters.tile_size if form.has_groups else 0
    outputs, inputs = (
        None if whole and step >= size and (axis or form.has_blocks) and not (axis and step == tile) else step
        for axis, (step, size) in enumerate(
            zip(_rows_first(form, matrix.steps), _rows_first(form, matrix.shape[-2:]), strict=True)
        )
    )
    if form.group_size is not None:
        inputs = form.group_size
    has_activations = parameters.act_qtype is not None
    return WeightGroup(form, (outputs, inputs), has_activations, parameters.has_zero_points, parameters.is_static)


def _rows_first(form: Format, pair: Sequence[int]) -> Sequence[int]:
    """Returns a pair in the order [outputs, inputs], however matrices are stored."""
    return pair[::-1] if form.input_first else pair


def _steps(parameters: _Parameters, form: Format, blocks: Shape, shape: Shape, released: Blocks) -> Shape:
    """Returns the numbers of rows and columns of a matrix that share a stored scale, if `blocks` share one in the
    checkpoint, and `released` in the release."""
    if form.has_blocks and all(n is not None and n % own == 0 for n, own in zip(released, blocks, strict=True)):
        return tuple(n for n in released if n is not None)
    (outputs, inputs), tile = _rows_first(form, blocks), parameters.tile_size
    rows, columns = _rows_first(form, shape)
    if form.packing is Packing.AWQ_WORDS and rows % AWQ_WORDS.per_group:
        raise parameters.refused(f"have {rows} outputs, and a word of {form.scheme} holds {AWQ_WORDS.per_group}")
    size = form.group_size or (tile if tile and inputs % tile == 0 else inputs)
    has_blocks = form.has_blocks and (outputs > 1 or not form.has_rows) and size < columns
    name = form.name or form.scheme
    if form.has_blocks and (block := parameters.block):
        if blocks != (found := tuple(min(block, n) for n in shape)):
            raise parameters.refused(f"have scales for blocks of {blocks}, not of {found} of the matrix")
        return block, block
    if size < columns and not form.has_groups and not has_blocks:
        raise parameters.refused(f"have scales for groups of {size} inputs, which {name} does not have")
    if size >= columns and not form.has_rows and outputs > 1:
        raise parameters.refused(f"have scales for complete rows, which {name} does not have")
    if inputs % size or (columns % size and not has_blocks):
        raise parameters.refused(f"have scales for {inputs} of {columns} inputs, no whole number of groups")
    return tuple(_rows_first(form, (outputs if has_blocks else 1, size)))


def _scale_dtype(parameters: _Parameters, form: Format, dtype: str) -> str:
    """safetensors' name of the dtype of stored scales, where the checkpoint has them in `dtype`."""
    own = CODES[dtype]
    if form.scale_dtype == "F16" and own == "F32" and "kept" not in parameters.facts[0]:
        raise parameters.refused(f"have scales in float32, and {form.scheme} has them in float16")
    return form.scale_dtype or own


def _values(form: Format, matrix: _Matrix, *, asymmetric: bool) -> Iterator[ExportTensor]:
    """Yields the tensors made of the quantized values."""
    name, base, shape = matrix.name, matrix.base, matrix.shape
    if form.packing is Packing.WORDS:
        words = -(-shape[1] // (PACK_WORD // form.bits))
        size = np.array(shape, np.int64)
        pack = partial(pack_words, form.bits)
        yield ExportTensor(f"{base}{WEIGHT}_packed", "I32", (shape[0], words), name, pack, sliced=True)
        yield ExportTensor.constant(f"{base}{WEIGHT}_shape", "I64", size, name)
    elif form.packing is Packing.PAIRS:
        yield ExportTensor(f"{base}{WEIGHT}_packed", "U8", (shape[0], shape[1] // 2), name, pack_halves, sliced=True)
    elif form.packing is Packing.AWQ_WORDS:
        stored = AWQ_WORDS.stored_shape(shape)
        yield ExportTensor(f"{base}.qweight", "I32", stored, name, pack_awq)
        if not asymmetric:
            stored = AWQ_WORDS.stored_shape(matrix.grid)
            yield ExportTensor(f"{base}.qzeros", "I32", stored, name, partial(_middles, matrix.grid))
    elif form.packing is Packing.GROUPS_APART:
        groups = matrix.grid[-1]
        stored = (*shape[:-1], groups, shape[-1] // groups // 2)
        make = partial(_groups_apart, stored[1:])
        yield ExportTensor(f"{name}_blocks", "U8", stored, name, make, sliced=True)
    else:
        dtype = "I8" if form.kind == "int" else "F8_E4M3"
        yield ExportTensor(name, dtype, shape, name, lambda values: values, sliced=True)


def _middles(grid: Shape, values: np.ndarray) -> np.ndarray:
    """Returns the zero points of a symmetric matrix. They are made when they are written: all zero points of a large
    model take gigabytes."""
    return AWQ_WORDS.pack(np.full(grid, MIDDLE, np.uint8))


def _groups_apart(inner: Shape, values: np.ndarray) -> np.ndarray:
    return pack_halves(values).reshape(-1, *inner)


def pack_awq(values: np.ndarray) -> np.ndarray:
    """int32 [I, O / 8] of integers [I, O] or of zero points, each with the offset 8, in AWQ's order."""
    return AWQ_WORDS.pack((values.view(np.uint8) + np.uint8(MIDDLE)) & np.uint8(AWQ_WORDS.mask))


def pack_words(bits: int, values: np.ndarray) -> np.ndarray:
    """int32 [O, words] of integers [O, I] of 4 or 8 bits, each with the offset 2^(bits - 1), the first in the lowest
    bits. The last word of a row is filled up with zeros."""
    rows, columns = values.shape
    offset = np.uint8(1 << (bits - 1))
    unsigned = np.empty((rows, columns + -columns % (PACK_WORD // bits)), np.uint8)
    unsigned[:, columns:] = 0
    # Without a carry, adding the offset to a number in two's complement changes the sign bit.
    np.bitwise_xor(values.view(np.uint8), offset, out=unsigned[:, :columns])
    return (pack_halves(unsigned) if bits == BITS_OF_HALVES else unsigned).view(np.int32)


def _scales(parameters: _Parameters, form: Format, matrix: _Matrix, dtype: str) -> Iterator[ExportTensor]:
    """Yields the tensors made of the scales."""
    name = matrix.name if form.is_of_experts else matrix.base

    def make(scales: np.ndarray) -> np.ndarray:
        stored = _stored_scales(dtype, _spread(matrix, scales))
        if stored is None:
            raise parameters.refused(f"have scales that {DTYPES[dtype].name} does not hold")
        return stored

    yield ExportTensor(f"{name}{form.scales}", dtype, matrix.grid, matrix.name, make, sliced=matrix.has_scales_of_rows)
    if form.tensor_scale:
        yield ExportTensor.constant(f"{name}{WEIGHT}_global_scale", "F32", np.ones(1, np.float32), matrix.name)


def _input_scales(
    scales: np.ndarray, cut: Binding, matrices: Sequence[_Matrix], ranges: Ranges
) -> Iterator[ExportTensor]:
    """Yields the tensors of static scales, one for each matrix. `scales` [L] are for all layers."""
    scales = next((scales[slice(*each)] for letter, each in ranges.items() if letter not in (EXPERTS, PLACES)), scales)
    names = [list(stack.names) for stack in cut.src]
    layer = {name: number * len(scales) // len(of_stack) for of_stack in names for number, name in enumerate(of_stack)}
    for matrix in matrices:
        own = scales[layer[matrix.name]].reshape(1)
        yield ExportTensor.constant(f"{matrix.base}.input_scale", "F32", own, matrix.name)


def _spread(matrix: _Matrix, values: np.ndarray) -> np.ndarray:
    """Returns scales or zero points of the shape that is stored: each repeated for all groups that it stands for, or
    one of several that are equal."""
    for axis, (block, step, count) in enumerate(zip(matrix.blocks, matrix.steps, matrix.grid[-2:], strict=True)):
        if block > step:
            values = np.repeat(values, block // step, axis=axis - 2).take(range(count), axis=axis - 2)
        elif step > block:
            values = values.take(range(0, values.shape[axis - 2], step // block), axis=axis - 2)
    return values


def _stored_scales(dtype: str, scales: np.ndarray) -> np.ndarray | None:
    """Scales in the dtype that is stored; None if that does not hold one of them."""
    if dtype == "U8":
        stored = exponents(scales)
        return stored if np.array_equal(np.ldexp(np.float32(1), stored.astype(np.int32) - 127), scales) else None
    stored = scales.astype(DTYPES[dtype], copy=False)
    return stored if stored is scales or np.array_equal(stored.astype(np.float32), scales.astype(np.float32)) else None


def _zero_points(form: Format, matrix: _Matrix) -> ExportTensor:
    """Returns the tensor made of the zero points."""
    if form.packing is Packing.AWQ_WORDS:
        stored = AWQ_WORDS.stored_shape(matrix.grid)
        return ExportTensor(
            f"{matrix.base}.qzeros", "I32", stored, matrix.name, lambda zeros: pack_awq(_spread(matrix, zeros))
        )
    words = Words(form.bits, 0)
    offset, mask = np.uint8(1 << (form.bits - 1)), np.uint8(words.mask)

    def pack(zeros: np.ndarray) -> np.ndarray:
        return words.pack((_spread(matrix, zeros).view(np.uint8) + offset) & mask)

    return ExportTensor(f"{matrix.base}{WEIGHT}_zero_point", "I32", words.stored_shape(matrix.grid), matrix.name, pack)
