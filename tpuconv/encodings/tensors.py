"""From the stored tensors of a checkpoint, with the names of its encoding, to the tensors that tables see."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tpuconv.encodings.decode import AFFINE_SCALE_DTYPES, Tensor
from tpuconv.encodings.flat import MAX_STATE_BYTES
from tpuconv.encodings.scheme import NESTED_SCALES, Scheme
from tpuconv.encodings.schemes import schemes
from tpuconv.names import collapse
from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import TensorInfo
from tpuconv.text import format_count


def decode_names(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None, *, any_scales: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a source as tables see them.

    Args:
        tensors: what is stored, by name.
        quantization: what config.json says about the encoding.
        any_scales: whether the scales are decoded without a check.

    Returns:
        The tensors by name, and the faults: values without scales, scales without values, and scales whose shape does
            not
        fit the blocks.

    Raises:
        UnsupportedConfig: an encoding that is not implemented.
    """
    known = schemes(quantization)
    suffixes = [suffix for scheme in known for suffix in scheme.suffixes]
    out: dict[str, Tensor] = {}
    taken: set[str] = set()
    unused: set[str] = set()
    faults: dict[str, list[str]] = {}
    for name, info in tensors.items():
        candidates = [scheme for scheme in known if scheme.encodes(info)]
        if not candidates:
            continue
        candidates.sort(key=lambda scheme: scheme.affine is None)  # values without zero points fit others too
        scheme = next((s for s in candidates if _has_scales_of(s, info, tensors)), candidates[0])
        base = name.removesuffix(scheme.values)
        scales = tensors.get(base + scheme.scales)
        extra = tuple(tensors[base + suffix] for suffix in scheme.extra if base + suffix in tensors)
        tensor_scale = tensors.get(base + scheme.tensor_scale) if scheme.tensor_scale else None
        affine = {suffix: tensors.get(base + suffix) for suffix in scheme.affine.suffixes} if scheme.affine else {}
        column_scales = tensors.get(base + scheme.column_scales) if scheme.column_scales else None
        parts = (*extra, tensor_scale, *affine.values(), column_scales)
        taken |= {name, base + scheme.scales, *(part.name for part in parts if part)}
        unused |= {base + suffix for suffix in scheme.unused}
        shape = _shape_of(scheme, info, scales)
        if scales is None:
            faults.setdefault(f"has no {scheme.scales.removeprefix('.')}", []).append(name)
        elif scales.shape != (want := scheme.scale_shape(shape, scales.shape)):
            faults.setdefault(f"should be {list(want)} by the block size", []).append(scales.name)
        elif scheme.tensor_scale and tensor_scale is None:
            faults.setdefault(f"has no {scheme.tensor_scale.removeprefix('.')}", []).append(name)
        elif tensor_scale is not None and prod(tensor_scale.shape) != 1:
            faults.setdefault("should be one number", []).append(tensor_scale.name)
        elif found := _affine_fault(scheme, affine, shape, scales, name) or _flat_fault(scheme, extra, info, scales):
            faults.setdefault(found[1], []).append(found[0])
        elif column_scales is not None and (column_scales.shape, column_scales.dtype in AFFINE_SCALE_DTYPES) != (
            (shape[-1],),
            True,
        ):
            faults.setdefault(f"should be one of {', '.join(AFFINE_SCALE_DTYPES)}, [{shape[-1]}]", []).append(
                column_scales.name
            )
        else:
            tensor = Tensor(
                *(base + scheme.name, shape, info, scales, extra, scheme.for_shape(shape), tensor_scale),
                zero_points=affine.get(scheme.affine.zero_points) if scheme.affine else None,
                group_index=affine.get(scheme.affine.group_index) if scheme.affine else None,
                column_scales=column_scales,
                any_scales=any_scales,
            )
            out[tensor.name] = tensor
    for name, info in tensors.items():
        if name in taken:
            continue
        is_part = any(name.endswith(suffix) for suffix in suffixes if suffix != ".weight")
        if is_part and name not in unused:
            faults.setdefault("has no values that it belongs to", []).append(name)
        else:
            out[name] = Tensor(name, info.shape, info, any_scales=any_scales)
    words = [
        f"{pattern}  {tensors[names[0]].dtype} {list(tensors[names[0]].shape)} "
        f"({format_count(len(names), 'tensor')}) {fault}"
        for fault, all_names in faults.items()
        for pattern, names in collapse(all_names).items()
    ]
    return out, words


def _shape_of(scheme: Scheme, values: TensorInfo, scales: TensorInfo | None) -> Shape:
    """Returns the widest shape of the stored values that the scales fit; the widest of all if they fit none."""
    if scales is not None:
        for shape in scheme.shapes(values.shape):
            if scales.shape == scheme.scale_shape(shape, scales.shape):
                return shape
    return scheme.shape(values.shape)


def _has_scales_of(scheme: Scheme, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> bool:
    """Returns True if the stored values have the scales and zero points of the scheme. A checkpoint may use several
    schemes."""
    base = info.name.removesuffix(scheme.values)
    scales = tensors.get(base + scheme.scales)
    shape = _shape_of(scheme, info, scales)
    if scales is None or scales.shape != scheme.scale_shape(shape, scales.shape):
        return False
    affine = {suffix: tensors.get(base + suffix) for suffix in scheme.affine.suffixes} if scheme.affine else {}
    return _affine_fault(scheme, affine, shape, scales, info.name) is None


def _flat_fault(
    scheme: Scheme, extra: Sequence[TensorInfo], values: TensorInfo, scales: TensorInfo
) -> tuple[str, str] | None:
    """Returns the fault of the tensors beside flat values, with the name of one; None if they have none."""
    if scheme.flat is None:
        return None
    base = values.name.removesuffix(scheme.values)
    found = {info.name.removeprefix(base): info for info in extra}
    own = replace(scheme, scale_dtype=scales.dtype)
    if scales.dtype not in ("F32", NESTED_SCALES):
        return scales.name, f"should be F32 or {NESTED_SCALES}"
    for suffix, kind in own.extra_kinds((), scales.shape).items():
        info = found.get(suffix)
        if info is None:
            return values.name, f"has no {suffix.removeprefix('.')}"
        if suffix == scheme.flat.state:
            if info.dtype != "U8" or len(info.shape) != 1 or info.nbytes > MAX_STATE_BYTES:
                return info.name, f"should be U8, of {MAX_STATE_BYTES} bytes at most"
        elif (info.dtype, info.shape) != kind:
            return info.name, f"should be {kind[0]} {list(kind[1])}"
    return None


def _affine_fault(
    scheme: Scheme, parts: Mapping[str, TensorInfo | None], shape: Shape, scales: TensorInfo, name: str
) -> tuple[str, str] | None:
    """Returns the fault of the zero points of a tensor or of the groups of its rows, with the name of a stored tensor;
    None if they have none."""
    if scheme.affine is None:
        return None
    if scales.dtype not in AFFINE_SCALE_DTYPES:
        return scales.name, f"should be one of {', '.join(AFFINE_SCALE_DTYPES)}"
    for suffix, want in scheme.affine_shapes(shape, scales.shape).items():
        part = parts.get(suffix)
        if part is None:
            if suffix == scheme.affine.zero_points or scheme.affine.any_order:
                return name, f"has no {suffix.removeprefix('.')}"
        elif (part.dtype, part.shape) != ("I32", want):
            return part.name, f"should be I32 {list(want)} by the values and their groups"
    return None


OF_ACTIVATIONS = "of quantized activations, which the model computes without"
"""The reason why such scales are skipped."""

_OF_ACTIVATIONS = re.compile(r".*\.((activation|(input|output|[qkv])(_global)?)_(scale|zero_point)|weight_scale_2)")


def unused_reason(name: str) -> str | None:
    """Returns the reason why a tensor of a quantized checkpoint does not concern the weights; None if it may. A second
    scale that no scheme takes brings weights to the range of FP8, for products with activations in FP8."""
    return OF_ACTIVATIONS if _OF_ACTIVATIONS.fullmatch(name) else None
