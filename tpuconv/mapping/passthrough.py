"""`--encoding keep`: rows whose tensors stay encoded, each as two rows, one for codes and one for scales.

Codes go through the row's layout, scales through the one that follows from it (`tpuconv.layout.scale_layout`). A block
that does not divide its axis, or straddles two places of the parameter, is refined to a divisor: its scale is repeated,
which is exact. So the two are what a Qwix `QArray` holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import numpy as np

from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.passthrough import QValues, Scales, scale_dtype
from tpuconv.encodings.scheme import Scheme
from tpuconv.errors import UnsupportedConfig
from tpuconv.layout import Shape, scale_layout
from tpuconv.mapping.table import Binding, Stack
from tpuconv.names import QVALUE, SCALE, collapse
from tpuconv.sources.headers import TensorInfo

QTYPE_BITS = {"float8_e4m3fn": 8, "int8": 8, "int4": 4, "float4_e2m1fn": 4}


@dataclass(frozen=True)
class Stored:
    """How the tensors of one stack are stored beside their values: dtype and shape of each one's scales, dtypes of what
    else belongs to it, and whether there is a scale of the whole tensor."""

    dtype: str
    shape: Shape
    extra: tuple[str, ...] = ()
    tensor_scale: bool = False

    @property
    def scale_dtype(self) -> np.dtype[Any]:
        """Of the scales that are kept."""
        return scale_dtype(self.dtype, self.tensor_scale)

    def to_json(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape), "extra": list(self.extra)}
        return facts | ({"tensor_scale": True} if self.tensor_scale else {})

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "Stored":
        has_tensor_scale = facts.get("tensor_scale", False)
        return cls(facts["dtype"], tuple(facts["shape"]), tuple(facts["extra"]), has_tensor_scale)


@dataclass(frozen=True)
class SplitRow:
    """A row in two. `grids` and `refine` say of each source's scales which shape they have along its axes and how often
    each is repeated; `tiles` of each target how many codes along every axis share a scale."""

    qvalues: Binding
    scales: Binding
    grids: tuple[Shape, ...]
    refine: tuple[Shape, ...]
    tiles: tuple[Shape, ...]


@dataclass(frozen=True)
class Passthrough:
    """A parameter that stays encoded: by which scheme, and how its source is stored, stack by stack."""

    scheme: Scheme
    tiles: Shape
    stored: tuple[Stored, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "qtype": self.scheme.qtype,
            "kept": self.scheme.title,
            "tiles": list(self.tiles),
            "bits": QTYPE_BITS[self.scheme.qtype] + 8 * self.stored[0].scale_dtype.itemsize / prod(self.tiles),
            "stored": [stored.to_json() for stored in self.stored],
        }


def split(binding: Binding, scheme: Scheme, scale_shapes: Sequence[Shape]) -> SplitRow:
    """The two rows of one whose tensors are all encoded by `scheme`, with scales of these shapes, a stack each.

    Raises:
        UnsupportedConfig: the scales do not follow the axes of the tensor or, refined, those of the parameter.
    """
    layout, sizes = binding.layout, binding.sizes
    blocks, grids = [], []
    for stack, shape, stored in zip(binding.src, layout.src_shapes(sizes), scale_shapes, strict=True):
        own = shape[stack.depth :]
        block = _blocks(scheme, own, stored)
        grids.append(tuple(-(-n // b) for n, b in zip(own, block, strict=True)))
        if prod(grids[-1]) != prod(stored):
            raise UnsupportedConfig(f"scales of shape {list(stored)} do not follow the axes of {stack.names[0]}")
        blocks.append((1,) * stack.depth + block)
    whole = [
        [b if n % b == 0 else gcd(n, b) for n, b in zip(shape, block, strict=True)]
        for shape, block in zip(layout.src_shapes(sizes), blocks, strict=True)
    ]
    follow = scale_layout(layout, sizes, whole)
    scales = _renamed(binding, scheme.scales, SCALE, scheme, sizes=follow.sizes, row=replace(binding.row, buffer=True))
    shapes = layout.dst_shapes(sizes), layout.dst_shapes(follow.sizes)
    tiles = tuple(tuple(n // s for n, s in zip(*pair, strict=True)) for pair in zip(*shapes, strict=True))
    if any(n % s for pair in zip(*shapes, strict=True) for n, s in zip(*pair, strict=True)):
        raise UnsupportedConfig(f"no scales of whole blocks fit '{layout}'")
    return SplitRow(
        qvalues=_renamed(binding, scheme.values, QVALUE, scheme),
        scales=scales,
        grids=tuple(grids),
        refine=tuple(
            tuple(b // (w // r) for b, w, r in zip(*ways, strict=True))[stack.depth :]
            for stack, *ways in zip(binding.src, blocks, whole, follow.refine, strict=True)
        ),
        tiles=tiles,
    )


def _blocks(scheme: Scheme, shape: Shape, scales: Shape) -> Shape:
    """The block of every axis, no longer than the axis."""
    if prod(scales) == 1:
        return shape
    rows, columns = scheme.block(shape, scales)
    block = (rows, *(1,) * (len(shape) - 2), columns) if len(shape) > 1 else (columns,)
    return tuple(map(min, zip(block, shape, strict=True)))


def _renamed(binding: Binding, suffix: str, ending: str, scheme: Scheme, **changes: Any) -> Binding:
    """With the stored names of the sources, and the targets' names for a part of a QArray."""
    return replace(
        binding,
        src=tuple(
            Stack(tuple(name.removesuffix(scheme.name) + suffix for name in stack.names), stack.depth)
            for stack in binding.src
        ),
        dst=tuple(Stack(tuple(name + ending for name in stack.names), stack.depth) for stack in binding.dst),
        **changes,
    )


def pass_through(
    tensors: Mapping[str, Tensor], bindings: Sequence[Binding], wanted: Sequence[Binding]
) -> tuple[dict[str, Tensor], list[Binding], dict[str, Passthrough], list[str]]:
    """Tensors and rows, of those that are `wanted` the encoded ones in two; what is kept, by parameter; the faults."""
    out_tensors, out_bindings = dict(tensors), []
    passthrough: dict[str, Passthrough] = {}
    mixed, odd = [], []
    chosen = set(map(id, wanted))
    for binding in bindings:
        first = tensors[binding.src[0].names[0]]
        if first.scheme is None or id(binding) not in chosen:
            out_bindings.append(binding)
            continue
        own = [[tensors[name] for name in stack.names] for stack in binding.src]
        if any(_scale_kind(tensor) != _scale_kind(stack[0]) for stack in own for tensor in stack) or any(
            (_title(stack[0]), _scales_of(stack[0]).dtype) != (first.scheme.title, _scales_of(first).dtype)
            for stack in own
        ):
            mixed.append(first.name)
            continue
        stored = tuple(
            Stored(
                _scales_of(s[0]).dtype,
                _scales_of(s[0]).shape,
                tuple(info.dtype for info in s[0].extra),
                s[0].tensor_scale is not None,
            )
            for s in own
        )
        try:
            parts = split(binding, first.scheme, [each.shape for each in stored])
        except UnsupportedConfig as e:
            odd.append(f"{first.name}  cannot be kept: {e.message}")
            continue
        scale_shapes = parts.scales.src_shapes()
        for stack, grid, refine in zip(own, parts.grids, parts.refine, strict=True):
            for tensor in stack:
                assert tensor.scheme is not None
                values, scales = tensor.values, _scales_of(tensor)
                out_tensors[values.name] = QValues(
                    values.name, tensor.shape, values, extra=tensor.extra, scheme=tensor.scheme
                )
                out_tensors[scales.name] = Scales(
                    scales.name,
                    scale_shapes[scales.name],
                    scales,
                    scheme=tensor.scheme,
                    tensor_scale=tensor.tensor_scale,
                    any_scales=tensor.any_scales,
                    grid=grid,
                    refine=refine,
                )
        out_bindings += [parts.qvalues, parts.scales]
        for target, tiles in zip(binding.dst, parts.tiles, strict=True):
            passthrough[target.names[0]] = Passthrough(first.scheme, tiles, stored)
    faults = [f"{p}  has not the scales of the tensors it is joined with" for p in collapse(mixed)]
    return out_tensors, out_bindings, passthrough, faults + odd


def _scales_of(tensor: Tensor) -> TensorInfo:
    assert tensor.scales is not None
    return tensor.scales


def _scale_kind(tensor: Tensor) -> tuple[Any, ...]:
    scales = _scales_of(tensor)
    return _title(tensor), tensor.shape, scales.dtype, scales.shape, [info.dtype for info in tensor.extra]


def _title(tensor: Tensor) -> str:
    return tensor.scheme.title if tensor.scheme else ""
