"""Rows whose tensors stay encoded, with `encoding="keep"`. Each becomes two rows, one for quantized values and one for
scales, and a third one if there are zero points.

Quantized values go through the row's layout, scales through the layout that follows from it
(`tpuconv.notation.layout.scale_layout`). If a block does not divide its axis, or lies in two places of the parameter,
it is refined to a divisor: its scale is repeated, which is exact. The result is what a Qwix `QArray` holds.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import numpy as np

from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.passthrough import QValues, Scales, ZeroPoints, scale_dtype
from tpuconv.encodings.scheme import NESTED_SCALES, Scheme
from tpuconv.errors import UnsupportedConfig
from tpuconv.names import QVALUE, SCALE, ZERO_POINT, collapse
from tpuconv.notation.layout import Shape, scale_layout
from tpuconv.notation.table import Binding, Stack
from tpuconv.sources.headers import TensorInfo

QTYPE_BITS = {"float8_e4m3fn": 8, "int8": 8, "int4": 4, "float4_e2m1fn": 4, "nf4": 4}
"""Bits of one quantized value."""


KEEP_FAULT = "cannot stay encoded"
"""How the faults of weights begin that no `QArray` holds, after their names."""

PartName = Callable[[str, str], str]
"""Names an array that holds a parameter, from the parameter's name and the suffix that the array has in our tree."""


def qwix_name(parameter: str, suffix: str) -> str:
    """Returns the names in our tree."""
    return f"{parameter}.{suffix}"


@dataclass(frozen=True)
class Stored:
    """How the tensors of one stack are stored besides their values.

    Attributes:
        dtype, shape: of the scales of each tensor, by safetensors' names.
        extra: dtypes of the other tensors that belong to each.
        tensor_scale: whether each tensor has a scale of its own too, or its scales have scales.
    """

    dtype: str
    shape: Shape
    extra: tuple[str, ...] = ()
    tensor_scale: bool = False

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """The dtype in which the scales are kept."""
        return scale_dtype(self.dtype, self.tensor_scale)

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's description of the tensor; `from_json` is the inverse."""
        facts: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "extra": list(self.extra)}
        return facts | ({"tensor_scale": True} if self.tensor_scale else {})

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Stored":
        """Returns the inverse of `to_json`."""
        has_tensor_scale = facts.get("tensor_scale", False)
        return cls(facts["dtype"], tuple(facts["shape"]), tuple(facts["extra"]), has_tensor_scale)


@dataclass(frozen=True)
class SplitRow:
    """A row split in two.

    Attributes:
        qvalues, scales, zero_points: the rows; no zero points if the scheme has none, or all in the middle.
        grids: for each source, the shape of its scales, with the axes of the tensor.
        refine: for each source, how often each scale is repeated along every axis.
        group_shape: for each target, how many quantized values along every axis share a scale.
    """

    qvalues: Binding
    scales: Binding
    zero_points: Binding | None
    grids: tuple[Shape, ...]
    refine: tuple[Shape, ...]
    group_shape: tuple[Shape, ...]


@dataclass(frozen=True)
class Passthrough:
    """A parameter that stays encoded.

    Attributes:
        scheme: how it is encoded.
        group_shape: how many quantized values along every axis share a scale.
        stored: how its sources are stored, stack by stack.
    """

    scheme: Scheme
    group_shape: Shape
    stored: tuple[Stored, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's description of the parameter."""
        bits, with_zeros = QTYPE_BITS[self.scheme.qtype], has_zero_points(self.scheme)
        shared = 8 * self.stored[0].scale_dtype.itemsize + (bits if with_zeros else 0)
        return {
            "qtype": self.scheme.qtype,
            "kept": self.scheme.title,
            "tiles": list(self.group_shape),
            "bits": bits + shared / prod(self.group_shape),
            "stored": [stored.to_json() for stored in self.stored],
            **({"zero_points": True} if with_zeros else {}),
        }


def has_zero_points(scheme: Scheme) -> bool:
    """True if zero points are stored beside the scales."""
    return scheme.affine is not None and not scheme.affine.symmetric


def split(binding: Binding, scheme: Scheme, scale_shapes: Sequence[Shape], part: PartName = qwix_name) -> SplitRow:
    """Splits a row whose tensors are all encoded by `scheme`, with scales of these shapes, one per stack.

    `part` names the arrays that hold the parameters.

    Raises:
        UnsupportedConfig: the scales do not follow the axes of the tensor or, refined, the axes of the parameter; or
            the row changes values.
    """
    if scheme.affine is not None and scheme.affine.any_order:
        raise UnsupportedConfig("its groups are in any order (desc_act), which no QArray has")
    if scheme.affine is not None and scheme.affine.offsets:
        raise UnsupportedConfig("its groups have offsets that are no zero points, which no QArray has")
    if not scheme.qtype:
        raise UnsupportedConfig(f"the values of {scheme.title} are a table that no type of Qwix has")
    if binding.arithmetic:
        raise UnsupportedConfig(f"the values of {next(iter(binding.arithmetic))} change")
    layout, sizes = binding.layout, binding.sizes
    blocks, grids = [], []
    for stack, shape, stored in zip(binding.src, layout.src_shapes(sizes), scale_shapes, strict=True):
        tensor_shape = shape[stack.depth :]
        if not scheme.has_blocks_of_rows(tensor_shape, stored):
            raise UnsupportedConfig(
                f"its blocks go over the ends of rows of {tensor_shape[-1]} values, which no tiles of a QArray do"
            )
        block = _blocks(scheme, tensor_shape, stored)
        grids.append(tuple(-(-n // b) for n, b in zip(tensor_shape, block, strict=True)))
        if prod(grids[-1]) != prod(stored):
            raise UnsupportedConfig(f"scales of shape {list(stored)} do not follow the axes of {stack.names[0]}")
        blocks.append((1,) * stack.depth + block)
    divisors = [
        [b if n % b == 0 else gcd(n, b) for n, b in zip(shape, block, strict=True)]
        for shape, block in zip(layout.src_shapes(sizes), blocks, strict=True)
    ]
    follow = scale_layout(layout, sizes, divisors)
    row = replace(binding.row, buffer=True)
    scales = _renamed(binding, scheme.scales, SCALE, scheme, part, sizes=follow.sizes, row=row)
    shapes = layout.dst_shapes(sizes), layout.dst_shapes(follow.sizes)
    group_shape = tuple(tuple(n // s for n, s in zip(*pair, strict=True)) for pair in zip(*shapes, strict=True))
    if any(n % s for pair in zip(*shapes, strict=True) for n, s in zip(*pair, strict=True)):
        raise UnsupportedConfig(f"no scales of whole blocks fit '{layout}'")
    zero_points = None
    if scheme.affine is not None and has_zero_points(scheme):
        stored_name = scheme.affine.zero_points
        zero_points = _renamed(binding, stored_name, ZERO_POINT, scheme, part, sizes=follow.sizes, row=row)
    return SplitRow(
        zero_points=zero_points,
        qvalues=_renamed(binding, scheme.values, QVALUE, scheme, part),
        scales=scales,
        grids=tuple(grids),
        refine=tuple(
            tuple(b // (w // r) for b, w, r in zip(*sizes_of_axes, strict=True))[stack.depth :]
            for stack, *sizes_of_axes in zip(binding.src, blocks, divisors, follow.refine, strict=True)
        ),
        group_shape=group_shape,
    )


def _blocks(scheme: Scheme, shape: Shape, scales: Shape) -> Shape:
    """Returns the block along every axis, no longer than the axis."""
    if prod(scales) == 1:
        return shape
    rows, columns = scheme.block(shape, scales)
    stacked = (1,) * (len(shape) - 2)
    block: Shape = (columns,) if len(shape) == 1 else (rows, *stacked, columns)
    if len(shape) > 2 and len(scales) > 2:  # of matrices that are stacked, blocks lie within each
        block = (*stacked, rows, columns)
    return tuple(map(min, zip(block, shape, strict=True)))


def _renamed(binding: Binding, suffix: str, ending: str, scheme: Scheme, part: PartName, **changes: Any) -> Binding:
    """Returns the binding with the stored names of the sources, and the names of a part of a QArray for the targets."""
    return replace(
        binding,
        src=tuple(
            Stack(tuple(name.removesuffix(scheme.name) + suffix for name in stack.names), stack.depth)
            for stack in binding.src
        ),
        dst=tuple(
            Stack(tuple(part(name, ending.removeprefix(".")) for name in stack.names), stack.depth)
            for stack in binding.dst
        ),
        **changes,
    )


def pass_through(
    tensors: Mapping[str, Tensor],
    bindings: Sequence[Binding],
    chosen: Sequence[Binding],
    part: PartName = qwix_name,
) -> tuple[dict[str, Tensor], list[Binding], dict[str, Passthrough], list[str]]:
    """Splits the `chosen` rows whose tensors are encoded.

    Returns:
        All tensors and rows, with those that were split; the parameters that stay encoded, by name; and the faults.
    """
    out_tensors, out_bindings = dict(tensors), []
    passthrough: dict[str, Passthrough] = {}
    mixed: list[str] = []
    unsupported: dict[str, list[str]] = {}
    chosen_ids = set(map(id, chosen))
    for binding in bindings:
        first = tensors[binding.src[0].names[0]]
        if first.scheme is None or id(binding) not in chosen_ids:
            out_bindings.append(binding)
            continue
        stacks = [[tensors[name] for name in stack.names] for stack in binding.src]
        if _are_mixed(stacks):
            mixed.append(first.name)
            continue
        stored = tuple(_stored(stack) for stack in stacks)
        try:
            _check_columns(tensor for stack in stacks for tensor in stack)
            parts = split(binding, first.scheme, [each.shape for each in stored], part)
        except UnsupportedConfig as e:
            unsupported.setdefault(e.message, []).append(first.name)
            continue
        for stack, grid, refine in zip(stacks, parts.grids, parts.refine, strict=True):
            for tensor in stack:
                out_tensors |= {info.name: info for info in _split_tensor(tensor, parts, grid, refine)}
        out_bindings += [row for row in (parts.qvalues, parts.scales, parts.zero_points) if row is not None]
        for target, group_shape in zip(binding.dst, parts.group_shape, strict=True):
            passthrough[target.names[0]] = Passthrough(first.scheme, group_shape, stored)
    faults = [f"{p}  has other scales than the tensors it is joined with" for p in collapse(mixed)]
    faults += [f"{p}  {KEEP_FAULT}: {why}" for why, names in unsupported.items() for p in collapse(names)]
    return out_tensors, out_bindings, passthrough, faults


def _are_mixed(stacks: Sequence[Sequence[Tensor]]) -> bool:
    """Returns True if tensors that are joined are encoded in several ways."""
    return any(_scale_kind(tensor) != _scale_kind(stack[0]) for stack in stacks for tensor in stack) or any(
        (_title(stack[0]), _scales_of(stack[0]).dtype) != (_title(stacks[0][0]), _scales_of(stacks[0][0]).dtype)
        for stack in stacks
    )


def _stored(stack: Sequence[Tensor]) -> Stored:
    """Returns how the tensors of a stack, which are encoded alike, are stored."""
    first = stack[0]
    scales, extra = _scales_of(first), tuple(info.dtype for info in _described(first))
    return Stored(scales.dtype, scales.shape, extra, first.tensor_scale is not None or _has_nested_scales(first))


def _check_columns(tensors: Iterable[Tensor]) -> None:
    """Raises UnsupportedConfig if columns of a tensor have scales."""
    if scaled := next((tensor for tensor in tensors if tensor.column_scales), None):
        assert scaled.scheme is not None
        raise UnsupportedConfig(
            f"each of its columns has a scale of its own too ({scaled.scheme.column_scales.removeprefix('.')}, "
            "of its inputs), and a QArray has only scales of groups"
        )


def _split_tensor(tensor: Tensor, parts: SplitRow, grid: Shape, refine: Shape) -> Iterator[Tensor]:
    """Yields the tensors of the rows of an encoded one: its quantized values, its scales, and its zero points if they
    have a row."""
    assert tensor.scheme is not None
    values, scales, scheme = tensor.values, _scales_of(tensor), tensor.scheme
    flat = tensor.flat_parts if scheme.flat else None
    shape = parts.scales.src_shapes()[scales.name]
    yield QValues(values.name, tensor.shape, values, extra=_described(tensor), scheme=scheme, grid=grid, parts=flat)
    yield Scales(
        scales.name,
        shape,
        scales,
        scheme=scheme,
        tensor_scale=tensor.tensor_scale,
        any_scales=tensor.any_scales,
        grid=grid,
        refine=refine,
        extra=tensor.extra if flat else (),
        parts=flat,
    )
    if parts.zero_points is not None:
        assert tensor.zero_points is not None
        zeros = tensor.zero_points
        yield ZeroPoints(zeros.name, shape, zeros, scheme=scheme, grid=grid, refine=refine)


def _described(tensor: Tensor) -> tuple[TensorInfo, ...]:
    """Returns the stored tensors that hold nothing but what the scheme says, in the order of `Scheme.described`."""
    assert tensor.scheme is not None
    zeros = None if has_zero_points(tensor.scheme) else tensor.zero_points
    return (*tensor.extra, *(info for info in (zeros, tensor.group_index) if info is not None))


def _has_nested_scales(tensor: Tensor) -> bool:
    assert tensor.scheme is not None
    return tensor.scheme.flat is not None and _scales_of(tensor).dtype == NESTED_SCALES


def _scales_of(tensor: Tensor) -> TensorInfo:
    assert tensor.scales is not None
    return tensor.scales


def _scale_kind(tensor: Tensor) -> tuple[Any, ...]:
    scales = _scales_of(tensor)
    return _title(tensor), tensor.shape, scales.dtype, scales.shape, [info.dtype for info in _described(tensor)]


def _title(tensor: Tensor) -> str:
    return tensor.scheme.title if tensor.scheme else ""
