"""The schemes that checkpoints use, each from its own description in config.json.

FP8 with blocks: DeepSeek-V3 technical report (arXiv:2412.19437), section 3.3. MXFP4: OCP Microscaling Formats (MX)
v1.0. compressed-tensors: the formats of that library, which its tests write and read (tests/test_writers.py). ModelOpt:
what that library exports, whose NVFP4 has two scales, in FP8 of 16 values and in float32 of the tensor; the names of
its algorithms are those of its hf_quant_config.json.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cache, partial
from itertools import chain
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import Each, Optional, check
from tpuconv.layout import Shape
from tpuconv.sources.source import TensorInfo

E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
"""Value of each code of an 8-bit float with 4 bits of exponent (arXiv:2209.05433)."""
INT4 = np.arange(-8, 8, dtype=np.float32)
INT8 = np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float32)
OFFSET_INT8 = np.arange(-128, 128, dtype=np.float32)
E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)

Blocks = tuple[int | None, int | None]
BY_SCALES: Blocks = (None, None)
"""One scale for the tensor or one for each row: the shape of the scales tells which."""


@dataclass(frozen=True)
class Scheme:
    """`values` and `scales` are the suffixes of stored names, `name` that of the tensor they make; `dtype` is the
    stored one of values, `per_element` how many values an element holds, `qtype` the type of one, `table` the value of
    each code: 256 of them, or 16 of codes that lie two in a byte, low half first. `blocks` is the block by rows and
    columns, None along an axis that the shape of the scales decides: one scale, or one for each. `turned` are the bits
    in which an integer's code differs from its two's complement. `tensor_scale` is the suffix of one more scale, of the
    whole tensor, by which those of blocks are multiplied, or `divided`. `scale_dtype` and, where their shape decides,
    `by_row` are what the description has releases store as scales; what they do store is read whatever it is."""

    title: str
    values: str
    scales: str
    name: str
    dtype: str
    qtype: str
    table: np.ndarray
    per_element: int
    blocks: Blocks
    extra: tuple[str, ...] = ()
    groups_apart: bool = False
    turned: int = 0
    tensor_scale: str = ""
    divided: bool = False
    scale_dtype: str = "F32"
    by_row: bool = False

    def encodes(self, info: TensorInfo) -> bool:
        has_blocks = len(info.shape) > self.groups_apart
        return info.name.endswith(self.values) and info.dtype == self.dtype and has_blocks

    def shape(self, stored: Shape) -> Shape:
        """The shape of the values."""
        if self.groups_apart:  # [..., groups, bytes of a group]
            return (*stored[:-2], stored[-2] * stored[-1] * self.per_element)
        return (*stored[:-1], stored[-1] * self.per_element)

    def stored_shape(self, shape: Shape) -> Shape:
        """The inverse of `shape`."""
        if self.groups_apart:
            assert self.blocks[1] is not None
            return (*shape[:-1], shape[-1] // self.blocks[1], self.blocks[1] // self.per_element)
        return (*shape[:-1], shape[-1] // self.per_element)

    def block(self, shape: Shape, scales: Shape) -> tuple[int, int]:
        """Rows and columns of a block."""
        rows, columns = self.blocks
        one_by_one = rows is None and scales in ((shape[0],), (shape[0], 1)) and shape[0] > 1
        if rows is None:
            rows = 1 if one_by_one else prod(shape[:-1])
        return rows, shape[-1] if columns is None else columns

    def scale_shape(self, shape: Shape, scales: Shape) -> Shape:
        """What the shape of the scales must be."""
        rows, columns = self.block(shape, scales)
        if self.blocks == BY_SCALES:
            return scales if scales in ((), (1,), (1, 1), (shape[0],)) else (shape[0], 1)
        grid = *(-(-n // rows) for n in shape[-2:-1]), -(-shape[-1] // columns)
        if len(shape) == 2 and scales == (grid[0], 1, grid[1], 1):  # ModelOpt leaves the axes within a block in place
            return scales
        return (*shape[:-2], *grid)

    def stored(self, name: str, shape: Shape) -> dict[str, tuple[str, Shape]]:
        """Dtype and shape, by name, of the tensors in which releases store one of this name and shape."""
        base = name.removesuffix(self.name)
        scales = self.scale_shape(shape, (shape[0], 1) if self.by_row else (1,))
        return {
            base + self.values: (self.dtype, self.stored_shape(shape)),
            base + self.scales: (self.scale_dtype, scales),
            **({base + self.tensor_scale: ("F32", (1,))} if self.tensor_scale else {}),
            **{base + suffix: ("I32", (len(shape),)) for suffix in self.extra},
        }


@dataclass(frozen=True)
class Group:
    """Weights that a description treats alike. They are stored in one of the `schemes`, of which names and dtypes of
    tensors tell; by the description alone it is the first. `takes` says by its name whether a matrix, which is neither
    an embedding nor a router, is one of them."""

    schemes: tuple[Scheme, ...]
    takes: Callable[[str], bool]
    patterns: tuple[tuple[str, str], ...] = ()
    """Those of `takes`, as `tpuconv.patterns` wants them, by `match` on a module and those that it is in: to be checked
    before it is called."""


def schemes(quantization: Mapping[str, Any] | None) -> tuple[Scheme, ...]:
    """The schemes that a `quantization_config` describes; none where there is none.

    Raises:
        UnsupportedConfig: a method, format or number of bits that is not implemented.
        ConfigError: a value of another type than it must be.
    """
    return tuple({scheme.title: scheme for group in groups(quantization) for scheme in group.schemes}.values())


def groups(quantization: Mapping[str, Any] | None) -> tuple[Group, ...]:
    """The groups that a `quantization_config` describes: of several that take a weight, its own is the first.

    Raises:
        UnsupportedConfig, ConfigError: as `schemes` does.
    """
    if quantization is None:
        return ()
    what = "config.json, quantization_config"
    method = check(quantization, {"quant_method": Optional((str, None))}, what, ConfigError).get("quant_method")
    what = "hf_quant_config.json" if "quantization" in quantization else what
    check(quantization, SCHEMAS.get(method, dict), what, ConfigError)
    if method == "fp8":
        return (_unless_named(quantization, _fp8(quantization)),)
    if method == "fbgemm_fp8":
        return (_unless_named(quantization, (_fp8_scheme("fbgemm FP8", ".weight_scale", BY_SCALES, by_row=True),)),)
    if method in ("modelopt", "modelopt_fp4"):
        return _modelopt(quantization)
    if method == "mxfp4":
        return (_unless_named(quantization, (MXFP4,)),)
    if method == "compressed-tensors":
        return _compressed(quantization)
    raise UnsupportedConfig(
        f"the encoding quant_method={method!r} is not implemented",
        hint="known are fp8, fbgemm_fp8, modelopt, mxfp4 and compressed-tensors; or convert an unquantized release",
    )


NAMES = Optional(([str], None))
ALGORITHM = {"quant_algo": Optional((str, None)), "group_size": Optional((int, None))}
MODELOPT_MODEL = {
    **ALGORITHM,
    "exclude_modules": NAMES,
    "ignore": NAMES,
    "quantized_layers": Optional((Each(ALGORITHM), None)),
}
MODELOPT = {**MODELOPT_MODEL, "quantization": Optional((MODELOPT_MODEL, str))}

SCHEMAS: Mapping[Any, Any] = {
    "fp8": {"modules_to_not_convert": NAMES},
    "fbgemm_fp8": {"modules_to_not_convert": NAMES},
    "mxfp4": {"modules_to_not_convert": NAMES},
    "modelopt": MODELOPT,
    "modelopt_fp4": MODELOPT,
    "compressed-tensors": {
        "format": Optional((str, None)),
        "ignore": NAMES,
        "transform_config": Optional((dict, None)),
        "sparsity_config": Optional((dict, None)),
        "config_groups": Optional(
            Each(
                {
                    "format": Optional((str, None)),
                    "targets": NAMES,
                    "weights": Optional(
                        (
                            {
                                "type": Optional((str, None)),
                                "num_bits": Optional((int, None)),
                                "strategy": Optional((str, None)),
                                "group_size": Optional((int, None)),
                                "actorder": Optional((str, bool, None)),
                                "symmetric": Optional((bool, None)),
                                "block_structure": Optional((str, [int], None)),
                            },
                            None,
                        )
                    ),
                }
            )
        ),
    },
}
"""By method: what is read of a description, and of which types. What values are implemented is said where they are."""

NAME = re.compile(r"[\w./-]*")
"""What is a name and no pattern: it is matched in no time."""


def _pattern(where: str, text: str, pattern: str) -> tuple[tuple[str, str], ...]:
    """A pattern to be checked, of a text that may be a mere name."""
    return () if NAME.fullmatch(text) else ((f"config.json, {where}", pattern),)


def _unless_named(quantization: Mapping[str, Any], own: tuple[Scheme, ...]) -> Group:
    """As transformers chooses: all but the head and the modules that are named, by a pattern of what their name begins
    with, up to a dot, or by how it ends."""
    names = quantization.get("modules_to_not_convert") or ()
    patterns = {name: rf"(?:{name})(?:\.|$)" for name in names}

    def takes(module: str) -> bool:
        return not module.endswith(("lm_head", *names)) and not any(
            _compiled(pattern).match(module) for pattern in patterns.values()
        )

    checked = (_pattern("modules_to_not_convert", name, pattern) for name, pattern in patterns.items())
    return Group(own, takes, tuple(chain.from_iterable(checked)))


_compiled = cache(re.compile)
"""`re` itself remembers 512 patterns, fewer than some releases have."""


def decode_scales(scales: np.ndarray) -> np.ndarray:
    """In float32. Bytes are exponents of two (E8M0)."""
    if scales.dtype == np.uint8:
        with np.errstate(over="ignore"):  # 255 is no number: infinity says so here
            return np.exp2(scales.astype(np.float32) - 127)
    return scales.astype(np.float32)


FP4: Mapping[str, Any] = {"dtype": "U8", "qtype": "float4_e2m1fn", "table": E2M1, "per_element": 2}

MXFP4 = Scheme(
    title="MXFP4",
    values="_blocks",
    scales="_scales",
    name="",
    blocks=(1, 32),
    groups_apart=True,
    scale_dtype="U8",
    **FP4,
)


FP8: Mapping[str, Any] = {
    "values": ".weight",
    "dtype": "F8_E4M3",
    "qtype": "float8_e4m3fn",
    "table": E4M3,
    "per_element": 1,
}


def _fp8_scheme(title: str, scales: str, blocks: Blocks, *, by_row: bool = False) -> Scheme:
    return Scheme(title=title, scales=scales, name=".weight", blocks=blocks, by_row=by_row, **FP8)


def _fp8(quantization: Mapping[str, Any]) -> tuple[Scheme, ...]:
    block = quantization.get("weight_block_size")
    if quantization.get("fmt", "e4m3") != "e4m3":
        raise UnsupportedConfig(f"FP8 with fmt={quantization['fmt']!r} is not implemented, only 'e4m3'")
    if block is None:  # two writers, two names
        return tuple(_fp8_scheme(f"FP8, {name} by tensor", f".{name}", BY_SCALES) for name in FP8_SCALES)
    if not _is_block(block):
        raise UnsupportedConfig(f"FP8 with weight_block_size={block!r} is not implemented, only [rows, columns]")
    return (_fp8_scheme(f"FP8, blocks of {block[0]}x{block[1]}", ".weight_scale_inv", (block[0], block[1])),)


FP8_SCALES = ("weight_scale_inv", "weight_scale")


def _is_block(block: Any) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)


NVFP4_GROUP = 16

MODELOPT_NVFP4 = Scheme(
    title="ModelOpt NVFP4",
    values=".weight",
    scales=".weight_scale",
    tensor_scale=".weight_scale_2",
    name=".weight",
    blocks=(1, NVFP4_GROUP),
    scale_dtype="F8_E4M3",
    **FP4,
)


MIXED = "MIXED_PRECISION"

MODELOPT_BLOCK = 128


def _modelopt(quantization: Mapping[str, Any]) -> tuple[Group, ...]:
    """As ModelOpt writes config.json, or one level below, as it writes a file of its own (`source.read_config`)."""
    own = quantization.get("quantization", quantization)
    if not isinstance(own, Mapping):
        raise UnsupportedConfig(f"modelopt with quantization={own!r} is not implemented")
    if str(own.get("quant_algo")).upper() != MIXED:
        left_out = {name: translate(name) for name in own.get("exclude_modules", own.get("ignore")) or ()}

        def takes(module: str) -> bool:
            return not any(_compiled(p).match(outer) for p in left_out.values() for outer in within(module))

        checked = (_pattern("exclude_modules", name, pattern) for name, pattern in left_out.items())
        return (Group(_modelopt_schemes(own), takes, tuple(chain.from_iterable(checked))),)
    layers = own.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise UnsupportedConfig(
            f"modelopt with quant_algo={MIXED!r} and quantized_layers={layers!r} is not implemented"
        )
    alike: dict[tuple[str, str], list[str]] = {}
    for name, layer in layers.items():
        alike.setdefault((str(layer.get("quant_algo")), str(layer.get("group_size"))), []).append(name)
    return tuple(
        Group(_modelopt_schemes(layers[names[0]]), partial(_is_within, set(names))) for names in alike.values()
    )


def within(module: str) -> list[str]:
    """A module and those that it is in: of experts the parent alone may be named."""
    return [module, *(module[:i] for i, letter in enumerate(module) if letter == ".")]


def _is_within(names: Collection[str], module: str) -> bool:
    return any(name in names for name in within(module))


def _modelopt_schemes(layer: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Of a model's or a layer's `quant_algo`, which some releases have in small letters."""
    size = layer.get("group_size")
    algorithm = str(layer.get("quant_algo")).upper()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return (_fp8_scheme("ModelOpt FP8", ".weight_scale", BY_SCALES, by_row=algorithm != "FP8"),)
    if algorithm == "FP8_PB_WO" and (size is None or (type(size) is int and size > 0)):
        n = size or MODELOPT_BLOCK
        return tuple(
            _fp8_scheme(f"ModelOpt FP8, {name} of blocks of {n}x{n}", f".{name}", (n, n))
            for name in reversed(FP8_SCALES)
        )
    if algorithm in ("NVFP4", "W4A16_NVFP4") and size in (None, NVFP4_GROUP):  # the second leaves activations alone
        return (MODELOPT_NVFP4,)
    raise UnsupportedConfig(
        f"the encoding of modelopt with quant_algo={layer.get('quant_algo')!r}"
        + (f" and group_size={size!r}" if size is not None else "")
        + " is not implemented",
        hint="known are FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4 and W4A16_NVFP4 in groups of 16, and "
        f"{MIXED} of these; or convert an unquantized release",
    )


# -- compressed-tensors -----------------------------------------------------------------------------------------------


FORMATS = (
    *(None, "dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"),
)

PACKED: Mapping[str, Any] = {"values": ".weight_packed", "dtype": "I32", "extra": (".weight_shape",)}
BYTES: Mapping[str, Any] = {"values": ".weight", "dtype": "I8", "qtype": "int8", "table": INT8, "per_element": 1}

STORED: Mapping[tuple[Any, Any], Mapping[str, Mapping[str, Any]]] = {
    ("float", 8): {"FP8": FP8},
    ("float", 4): {"FP4": {"values": ".weight_packed", **FP4}},
    ("int", 8): {
        "INT8": BYTES,
        "packed INT8": {**PACKED, "qtype": "int8", "table": OFFSET_INT8, "per_element": 4, "turned": 0x80},
    },
    ("int", 4): {
        "INT4": {**PACKED, "qtype": "int4", "table": INT4, "per_element": 8, "turned": 0x8},
        "INT4 in bytes": BYTES,
    },
}
"""By type and number of bits: the ways in which weights are stored, of which the names and dtypes of tensors tell."""

TENSOR_GROUP = "tensor_group"
"""The strategy of scales in groups with one more of the tensor."""

STORED_WITH_TWO_SCALES: Mapping[tuple[Any, Any], Mapping[str, Mapping[str, Any]]] = {
    ("float", 4): {
        "NVFP4": {"values": ".weight_packed", "tensor_scale": ".weight_global_scale", "divided": True, **FP4}
    },
}


PACKED_FORMAT, BYTES_FORMATS = "pack-quantized", ("int-quantized", "naive-quantized")
"""Formats that tell which of two ways it is."""

SCALE_DTYPES: Mapping[tuple[Any, Any], str] = {("float", "group"): "U8", ("float", TENSOR_GROUP): "F8_E4M3"}
"""By type and strategy: of scales that are not of the type that the weights had."""


def _compressed(quantization: Mapping[str, Any]) -> tuple[Group, ...]:
    config_groups = quantization.get("config_groups")
    if not isinstance(config_groups, Mapping) or not config_groups:
        raise UnsupportedConfig("compressed-tensors without config_groups is not implemented")
    for key in ("transform_config", "sparsity_config"):
        own = quantization.get(key) or {}
        if own and own.get("format") != "dense":
            raise UnsupportedConfig(f"compressed-tensors with {key}={own!r} is not implemented")
    ignored = quantization.get("ignore") or ()
    out = []
    for group in sorted(config_groups.values(), key=_takes_all):
        for stored_in in (group.get("format"), quantization.get("format")):
            if stored_in not in FORMATS:
                raise UnsupportedConfig(f"compressed-tensors with format={stored_in!r} is not implemented")
        weights = group.get("weights") or {}
        known = STORED_WITH_TWO_SCALES if weights.get("strategy") == TENSOR_GROUP else STORED
        stored = known.get((weights.get("type"), weights.get("num_bits")))
        by, blocks = _compressed_blocks(weights)
        ordered = weights.get("actorder") in ("group", "dynamic")
        if stored is None or blocks is None or weights.get("symmetric", True) is not True or ordered:
            raise UnsupportedConfig(
                f"compressed-tensors weights with {dict(weights)} are not implemented",
                hint="known are symmetric float 8, int 8 and int 4 by tensor, channel, group or block, and float 4 by "
                "group or tensor_group, none with actorder 'group'",
            )
        scale_dtype = SCALE_DTYPES.get((weights.get("type"), weights.get("strategy")), "BF16")
        own = [
            Scheme(
                title=f"compressed-tensors {name} {by}",
                scales=".weight_scale",
                name=".weight",
                blocks=blocks,
                scale_dtype=scale_dtype,
                by_row=weights.get("strategy") == "channel",
                **how,
            )
            for name, how in stored.items()
        ]
        formats = {group.get("format"), quantization.get("format")}
        if formats & {PACKED_FORMAT, *BYTES_FORMATS}:
            own.sort(key=lambda scheme: bool(scheme.extra) != (PACKED_FORMAT in formats))
        targets = group.get("targets") or (LINEAR,)
        checked = (
            _pattern(where, name, name.removeprefix("re:"))
            for where, names in (("targets", targets), ("ignore", ignored))
            for name in names
            if name.startswith("re:")
        )
        takes = partial(_is_target, targets, ignored)
        out.append(Group(tuple(own), takes, tuple(chain.from_iterable(checked))))
    return tuple(out)


LINEAR = "Linear"
"""The class of modules, in the place of a name."""


def _takes_all(group: Mapping[str, Any]) -> bool:
    return LINEAR in (group.get("targets") or (LINEAR,))


def _is_target(targets: Sequence[str], ignored: Sequence[str], module: str) -> bool:
    """As compressed-tensors chooses: by a name, a pattern from the left, or the class of a module."""

    def matches(target: str) -> bool:
        return bool(_compiled(target[3:]).match(module)) if target.startswith("re:") else target in (module, LINEAR)

    return any(map(matches, targets)) and not any(map(matches, ignored))


def _compressed_blocks(weights: Mapping[str, Any]) -> tuple[str, Blocks | None]:
    """In words and in numbers; None where there are no such."""
    strategy, size, block = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if isinstance(block, str):  # as older ones have it: "128x128"
        block = [int(n) if n.isdecimal() and len(n) < 10 else 0 for n in block.split("x")]
    if strategy in ("tensor", "channel"):
        return f"by {strategy}", BY_SCALES
    if strategy in ("group", TENSOR_GROUP) and type(size) is int and size > 0:
        return f"in groups of {size}", (1, size)
    if strategy == "block" and block is not None and _is_block(block):
        return f"in blocks of {block[0]}x{block[1]}", (block[0], block[1])
    return "", None
