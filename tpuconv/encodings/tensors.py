"""From the stored tensors of a checkpoint, with the names of its encoding, to the tensors that tables see."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.flat import MAX_STATE_BYTES
from tpuconv.encodings.groups import SchemeGroup, within
from tpuconv.encodings.scheme import FLOAT_SCALES, Scheme
from tpuconv.encodings.schemes import groups, schemes
from tpuconv.errors import ConfigError
from tpuconv.names import collapse
from tpuconv.notation.layout import Shape
from tpuconv.notation.spelling import template
from tpuconv.patterns import check_patterns
from tpuconv.sources.headers import TensorInfo
from tpuconv.text import format_count

Fault = tuple[str, str]
"""The name of a stored tensor, and what is wrong with it."""


@dataclass(frozen=True)
class _Parts:
    """The stored tensors of a weight by the names of a scheme, each None if it is absent.

    Attributes:
        shape: of the weight: the widest one that the scales fit, or the widest of all if they fit none.
        affine: zero points, groups of rows and offsets, by suffix.
    """

    scheme: Scheme
    values: TensorInfo
    shape: Shape
    scales: TensorInfo | None
    extra: tuple[TensorInfo, ...]
    tensor_scale: TensorInfo | None
    affine: Mapping[str, TensorInfo | None]
    column_scales: TensorInfo | None

    @classmethod
    def find(cls, scheme: Scheme, values: TensorInfo, tensors: Mapping[str, TensorInfo]) -> "_Parts":
        """Returns the tensors of the weight whose values are `values`."""
        base = values.name.removesuffix(scheme.values)
        scales = tensors.get(base + scheme.scales)
        if scales is not None and scheme.scales_in_bytes and scales.dtype == "U8":
            scales = replace(scales, dtype=scheme.scale_dtype)
        return cls(
            scheme,
            values,
            _shape_of(scheme, values, scales),
            scales,
            tuple(tensors[base + suffix] for suffix in scheme.extra if base + suffix in tensors),
            tensors.get(base + scheme.tensor_scale) if scheme.tensor_scale else None,
            {suffix: tensors.get(base + suffix) for suffix in scheme.affine.suffixes} if scheme.affine else {},
            tensors.get(base + scheme.column_scales) if scheme.column_scales else None,
        )

    @property
    def base(self) -> str:
        """The name of the module."""
        return self.values.name.removesuffix(self.scheme.values)

    @property
    def name(self) -> str:
        """The name of the weight."""
        return self.values.name if self.scheme.values == self.scheme.name else self.base + self.scheme.name

    @property
    def names(self) -> set[str]:
        """The names of all of them, and the name of the scales even if these are absent."""
        parts = (self.values, *self.extra, self.tensor_scale, *self.affine.values(), self.column_scales)
        return {self.base + self.scheme.scales, *(part.name for part in parts if part)}

    @property
    def has_scales(self) -> bool:
        """True if the scales and zero points have the shapes of the scheme."""
        return (
            self.scales is not None
            and self.scales.shape == self.scheme.scale_shape(self.shape, self.scales.shape)
            and _affine_fault(self.scheme, self.affine, self.shape, self.scales, self.values.name) is None
        )

    def tensor(self, *, any_scales: bool) -> Tensor:
        """Returns the weight."""
        affine = self.scheme.affine
        return Tensor(
            self.name,
            self.shape,
            self.values,
            self.scales,
            self.extra,
            self.scheme.for_shape(self.shape),
            self.tensor_scale,
            zero_points=self.affine.get(affine.zero_points) if affine else None,
            group_index=self.affine.get(affine.group_index) if affine else None,
            offsets=self.affine.get(affine.offsets) if affine else None,
            column_scales=self.column_scales,
            any_scales=any_scales,
        )

    @cached_property
    def fault(self) -> Fault | None:
        """The first fault; None if the tensors belong together."""
        scheme, scales, name = self.scheme, self.scales, self.values.name
        if scheme.affine and (want := scheme.stored_shape(self.shape)) != self.values.shape:
            words = scheme.affine.words
            return name, f"should be {list(want)}: {words.per_group} values fill {words.words_per_group} words"
        if scales is None:
            return name, f"has no {scheme.scales.removeprefix('.')}"
        if scales.shape != (want := scheme.scale_shape(self.shape, scales.shape)):
            return scales.name, f"should be {list(want)} by the block size"
        if scales.dtype not in scheme.scale_dtypes:
            return scales.name, f"should be one of {', '.join(scheme.scale_dtypes)}: {scheme.title} has no other scales"
        if scheme.tensor_scale:
            if self.tensor_scale is None:
                return name, f"has no {scheme.tensor_scale.removeprefix('.')}"
            if prod(self.tensor_scale.shape) != 1 or self.tensor_scale.dtype != "F32":
                return self.tensor_scale.name, "should be one number, F32"
        if found := _affine_fault(scheme, self.affine, self.shape, scales, name):
            return found
        if found := _flat_fault(scheme, self.extra, self.values, scales):
            return found
        for info in self.extra:
            suffix = info.name.removeprefix(self.base)
            if suffix == scheme.zeros or suffix in scheme.constants:
                dtype, shape = scheme.extra_kinds(self.shape, scales.shape)[suffix]
                if (info.dtype, info.shape) != (dtype, shape):
                    return info.name, f"should be {dtype} {list(shape)}"
        columns = self.column_scales
        if columns is not None and (columns.shape != self.shape[-1:] or columns.dtype not in FLOAT_SCALES):
            return columns.name, f"should be one of {', '.join(FLOAT_SCALES)}, [{self.shape[-1]}]"
        return None


def decode_names(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None, *, any_scales: bool = False
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a source as tables see them.

    Args:
        tensors: what is stored, by name.
        quantization: what config.json says about the encoding.
        any_scales: whether the scales are decoded without a check.

    Returns:
        The tensors by name, and the faults: values without scales, scales without values, scales whose shape does not
            fit the blocks or whose dtype is none of the scheme, and weights that are stored twice.

    Raises:
        UnsupportedConfig: an encoding that is not implemented.
        ConfigError: a pattern of the description that is needed is invalid or slow.
    """
    known = schemes(quantization)
    suffixes = [suffix for scheme in known for suffix in scheme.suffixes]
    out: dict[str, Tensor] = {}
    taken: set[str] = set()
    unused: set[str] = set()
    faults: dict[str, list[str]] = {}
    described = groups(quantization)
    for parts in _choose(tensors, known, described):
        taken |= parts.names
        unused |= {parts.base + suffix for suffix in parts.scheme.unused}
        name = parts.name
        if found := parts.fault:
            faults.setdefault(found[1], []).append(found[0])
        elif name in out:
            faults.setdefault(_twice(out[name]), []).append(parts.values.name)
        else:
            out[name] = parts.tensor(any_scales=any_scales)
    for size, name in _of_other_sizes(out.values(), described):
        faults.setdefault(f"is {size} by its scales, unlike most weights: scales may be lost", []).append(name)
    for suffix, name in _left_out(out.values()):
        faults.setdefault(f"has no {suffix.removeprefix('.')}, and others of its kind have one", []).append(name)
    for name, info in tensors.items():
        if name in taken:
            continue
        is_part = any(name.endswith(suffix) for suffix in suffixes if suffix != ".weight")
        if is_part and name not in unused:
            faults.setdefault("has no values that it belongs to", []).append(name)
        elif name in out:
            faults.setdefault(_twice(out[name]), []).append(name)
        else:
            out[name] = Tensor(name, info.shape, info, any_scales=any_scales)
    words = [
        f"{pattern}  {tensors[names[0]].dtype} {list(tensors[names[0]].shape)} "
        f"({format_count(len(names), 'tensor')}) {fault}"
        for fault, all_names in faults.items()
        for pattern, names in collapse(all_names).items()
    ]
    return out, words


def _choose(
    tensors: Mapping[str, TensorInfo], known: Sequence[Scheme], described: Sequence[SchemeGroup]
) -> Iterable[_Parts]:
    """Yields the parts of each weight by the scheme that fits them; if several fit, by the scheme of the group which
    has the module by the description. A checkpoint may use several schemes."""
    known = sorted(known, key=lambda scheme: scheme.affine is None)  # values without zero points fit others too
    found = (
        (_Parts.find(scheme, info, tensors) for scheme in encoding)
        for info in tensors.values()
        if (encoding := [scheme for scheme in known if scheme.encodes(info)])
    )
    if len(described) < 2 and not any(_sizes(described)):
        return map(_best, found)  # one after the other: a large model has 70,000
    return _described(list(map(list, found)), described)


def _best(candidates: Iterable[_Parts]) -> _Parts:
    """Returns the first that fits; else the first whose scales have the shapes of its scheme; else the first."""
    others = []
    for parts in candidates:
        if parts.fault is None:
            return parts
        others.append(parts)
    return next((parts for parts in others if parts.has_scales), others[0])


def _described(found: Sequence[Sequence[_Parts]], described: Sequence[SchemeGroup]) -> list[_Parts]:
    """Returns the parts of each weight, of all that are found for it, by a description of several groups, or of a group
    with several sizes of blocks."""
    out = list(map(_best, found))
    all_fits = [[parts for parts in candidates if parts.fault is None] for candidates in found]
    unclear = {number: fits for number, fits in enumerate(all_fits) if len(fits) > 1 and len(described) > 1}
    if unclear:
        check_patterns(
            list(dict.fromkeys(pattern for group in described for pattern in group.patterns)),
            (outer for fits in unclear.values() for outer in within(fits[0].base)),
            ConfigError,
            method="match",
        )
    for number, fits in unclear.items():
        for group in described:
            titles = {scheme.title for scheme in group.schemes}
            own = [parts for parts in fits if parts.scheme.title in titles]
            if own and group.takes(own[0].base):
                out[number] = own[0]
                break
    for sizes in _sizes(described):
        usual = _most_common(parts.scheme.title for fits in all_fits for parts in fits if parts.scheme.title in sizes)
        for number, fits in enumerate(all_fits):
            out[number] = next((parts for parts in fits if parts.scheme.title == usual), out[number])
    return out


def _most_common(titles: Iterable[str]) -> str | None:
    """Returns the title that is there most often, the first of several; None if there is none."""
    return next((title for title, _ in Counter(titles).most_common(1)), None)


def _sizes(described: Sequence[SchemeGroup]) -> Iterable[list[str]]:
    """Yields the titles of schemes of which a model has one: the description does not say the size of the blocks."""
    for group in described:
        if len({scheme.blocks for scheme in group.schemes}) > 1:
            yield [scheme.title for scheme in group.schemes]


def _of_other_sizes(tensors: Iterable[Tensor], described: Sequence[SchemeGroup]) -> Iterable[Fault]:
    """Yields the weights whose scales have another number than the size of blocks of most weights gives, with their
    schemes: where only the shape of the scales tells the size, some of them may be lost."""
    own = [(tensor.values.name, tensor.scheme.title) for tensor in tensors if tensor.scheme]
    for titles in _sizes(described):
        usual = _most_common(title for _, title in own if title in titles)
        yield from ((title, name) for name, title in own if title in titles and title != usual)


def _twice(tensor: Tensor) -> str:
    return f"is the weight that {tensor.values.name.rpartition('.')[2]} beside it holds: remove one of the two"


def _left_out(tensors: Iterable[Tensor]) -> Iterable[Fault]:
    """Yields what weights lack that others of the same name in other layers have, with the names of their values. Their
    values would be taken for others: rows in the order of their groups, inputs without scales. Experts that no text
    of a calibration reached have no scales of inputs."""
    alike: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.scheme is not None and (tensor.scheme.affine or tensor.scheme.column_scales):
            alike.setdefault((template(tensor.name), tensor.scheme.title), []).append(tensor)
    for (name, _), own in alike.items():
        scheme = own[0].scheme
        assert scheme is not None
        if scheme.affine and any(tensor.group_index for tensor in own):
            suffix = scheme.affine.group_index
            yield from ((suffix, tensor.values.name) for tensor in own if tensor.group_index is None)
        if ".experts." not in name and any(tensor.column_scales for tensor in own):
            suffix = scheme.column_scales
            yield from ((suffix, tensor.values.name) for tensor in own if tensor.column_scales is None)


def _shape_of(scheme: Scheme, values: TensorInfo, scales: TensorInfo | None) -> Shape:
    """Returns the widest shape of the stored values that the scales fit; the widest of all if they fit none."""
    if scales is not None:
        for shape in scheme.shapes(values.shape):
            if scales.shape == scheme.scale_shape(shape, scales.shape):
                return shape
    return scheme.shape(values.shape)


def _flat_fault(scheme: Scheme, extra: Sequence[TensorInfo], values: TensorInfo, scales: TensorInfo) -> Fault | None:
    """Returns the fault of the tensors beside flat values, with the name of one; None if they have none."""
    if scheme.flat is None:
        return None
    base = values.name.removesuffix(scheme.values)
    found = {info.name.removeprefix(base): info for info in extra}
    own = replace(scheme, scale_dtype=scales.dtype)
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
) -> Fault | None:
    """Returns the fault of the zero points of a tensor or of the groups of its rows, with the name of a stored tensor;
    None if they have none."""
    if scheme.affine is None:
        return None
    for suffix, want in scheme.affine_shapes(shape, scales.shape).items():
        part = parts.get(suffix)
        if part is None:
            if suffix != scheme.affine.group_index or scheme.affine.any_order:
                return name, f"has no {suffix.removeprefix('.')}"
            continue
        dtypes = FLOAT_SCALES if suffix == scheme.affine.offsets else ("I32",)
        if part.dtype not in dtypes or part.shape != want:
            return part.name, f"should be {' or '.join(dtypes)} {list(want)} by the values and their groups"
    return None


OF_ACTIVATIONS = "of quantized activations, which the model computes without"
"""The reason why such scales are skipped."""

_OF_ACTIVATIONS = re.compile(
    r".*\.((activation|(input|output|[qkv])(_global)?)_(scale|zero_point)(_2)?|weight_scale_2)"
)


def is_encoded(tensors: Mapping[str, Tensor], faults: Sequence[str]) -> bool:
    """Returns whether any tensor is encoded, by what `decode_names` returns."""
    return bool(faults) or any(tensor.scheme for tensor in tensors.values())  # all of them may have faults


def unused_reason(name: str) -> str | None:
    """Returns the reason why a tensor of a quantized checkpoint does not concern the weights; None if it may. A second
    scale that no scheme takes brings weights to the range of FP8, for products with activations in FP8."""
    return OF_ACTIVATIONS if _OF_ACTIVATIONS.fullmatch(name) else None
