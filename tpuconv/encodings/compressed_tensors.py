"""Schemes as compressed-tensors describes them: the formats of that library, which its tests write and read."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from tpuconv.encodings.affine import Affine
from tpuconv.encodings.groups import NAMES, UNQUANTIZED, SchemeGroup, compiled_pattern, pattern_to_check
from tpuconv.encodings.scheme import (
    BY_SCALES,
    FP4_FIELDS,
    FP8_FIELDS,
    INT4,
    INT8,
    OFFSET_INT8,
    STATED_SHAPE,
    Blocks,
    Scheme,
    is_block,
)
from tpuconv.encodings.words import Words
from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import Each, Optional

COMPRESSED = {
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
}
"""Which keys of a description are read, and their types."""

KNOWN_FORMATS = (
    *(None, "dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "nvfp4-pack-quantized"),
)
PACKED_FIELDS: Mapping[str, Any] = {"values": ".weight_packed", "dtype": "I32", "extra": (STATED_SHAPE,)}
BYTES_FIELDS: Mapping[str, Any] = {"values": ".weight", "dtype": "I8", "qtype": "int8", "table": INT8, "per_element": 1}
STORED: Mapping[tuple[Any, Any], Mapping[str, Mapping[str, Any]]] = {
    ("float", 8): {"FP8": FP8_FIELDS},
    ("float", 4): {"FP4": {"values": ".weight_packed", **FP4_FIELDS}},
    ("int", 8): {
        "INT8": BYTES_FIELDS,
        "packed INT8": {**PACKED_FIELDS, "qtype": "int8", "table": OFFSET_INT8, "per_element": 4, "xor_mask": 0x80},
    },
    ("int", 4): {
        "INT4": {**PACKED_FIELDS, "qtype": "int4", "table": INT4, "per_element": 8, "xor_mask": 0x8},
        "INT4 in bytes": BYTES_FIELDS,
    },
}
"""By type and number of bits, the ways in which weights are stored. Names and dtypes of tensors tell which."""


def _asymmetric(bits: int, packed: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Zero points are packed along the rows, other than values."""
    zeros = Affine(Words(bits, 1), ".weight_zero_point", Words(bits, 0))
    return {f"asymmetric INT{bits}": {**packed, "affine": zeros}}


STORED_WITH_ZERO_POINTS: Mapping[tuple[Any, Any], Mapping[str, Mapping[str, Any]]] = {
    ("int", 8): _asymmetric(8, STORED["int", 8]["packed INT8"]),
    ("int", 4): _asymmetric(4, STORED["int", 4]["INT4"]),
}
TENSOR_GROUP = "tensor_group"
"""The strategy with scales of groups and one more scale of the tensor."""
STORED_WITH_TWO_SCALES: Mapping[tuple[Any, Any], Mapping[str, Mapping[str, Any]]] = {
    ("float", 4): {
        "NVFP4": {"values": ".weight_packed", "tensor_scale": ".weight_global_scale", "divided": True, **FP4_FIELDS}
    },
}
PACKED_FORMAT, BYTES_FORMATS = "pack-quantized", ("int-quantized", "naive-quantized")
"""Formats that tell which of two ways is used."""
STORED_SCALE_DTYPES: Mapping[tuple[Any, Any], str] = {("float", "group"): "U8", ("float", TENSOR_GROUP): "F8_E4M3"}
"""By type and strategy, the dtype of scales if it differs from the original weights."""


def compressed_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the groups of a compressed-tensors description.

    Raises:
        UnsupportedConfig: a format, strategy or number of bits that is not implemented.
    """
    ignored, out = quantization.get("ignore") or (), []
    for group in sorted(_described_groups(quantization), key=_takes_all):
        targets = group.get("targets") or (LINEAR,)
        checked = (
            pattern_to_check(where, name, name.removeprefix("re:"))
            for where, names in (("targets", targets), ("ignore", ignored))
            for name in names
            if name.startswith("re:")
        )
        schemes = _group_schemes(group, (group.get("format"), quantization.get("format")))
        takes = partial(_is_target, targets, ignored)
        out.append(SchemeGroup(tuple(schemes), takes, tuple(chain.from_iterable(checked))))
    return tuple(out)


def _described_groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the groups as they are described. Raises UnsupportedConfig if there is none, or something besides."""
    config_groups = quantization.get("config_groups")
    if not isinstance(config_groups, Mapping) or not config_groups:
        raise UnsupportedConfig(
            "compressed-tensors without config_groups is not implemented",
            hint="config_groups say how the weights are stored: take the config.json of the release, or, if no weight "
            "is quantized, remove its quantization_config",
        )
    for key in ("transform_config", "sparsity_config"):
        own = quantization.get(key) or {}
        if own and own.get("format") != "dense":
            raise UnsupportedConfig(f"compressed-tensors with {key}={own!r} is not implemented", hint=UNQUANTIZED)
    return list(config_groups.values())


def _group_schemes(group: Mapping[str, Any], formats: Sequence[str | None]) -> list[Scheme]:
    """Returns the schemes of a group that is stored in these formats; the first one that fits is taken. Raises
    UnsupportedConfig if the format, the strategy or the number of bits is not implemented."""
    for stored_in in formats:
        if stored_in not in KNOWN_FORMATS:
            raise UnsupportedConfig(
                f"compressed-tensors with format={stored_in!r} is not implemented", hint=UNQUANTIZED
            )
    weights = group.get("weights") or {}
    kind, strategy = weights.get("type"), weights.get("strategy")
    known = STORED_WITH_TWO_SCALES if strategy == TENSOR_GROUP else STORED
    if is_asymmetric := weights.get("symmetric", True) is not True:
        known = STORED_WITH_ZERO_POINTS if strategy in ("channel", "group") else {}
    stored = known.get((kind, weights.get("num_bits")))
    by, blocks = _compressed_blocks(weights)
    if is_asymmetric and blocks == BY_SCALES:
        blocks = (1, None)
    ordered = weights.get("actorder") is True or str(weights.get("actorder")).lower() in ("group", "dynamic")
    if stored is None or blocks is None or ordered:
        raise UnsupportedConfig(
            f"compressed-tensors weights with {dict(weights)} are not implemented",
            hint="known are symmetric float 8, int 8 and int 4 by tensor, channel, group or block, and float 4 by "
            "group or tensor_group, and packed int 8 and int 4 with zero points by channel or group, none with "
            "actorder 'group'",
        )
    schemes = [
        Scheme(
            title=f"compressed-tensors {name} {by}",
            scales=".weight_scale",
            name=".weight",
            blocks=blocks,
            scale_dtype=STORED_SCALE_DTYPES.get((kind, strategy), "BF16"),
            by_row=strategy == "channel",
            any_sign=kind == "int",
            rounds_inputs=_rounds_alike(group.get("input_activations"), weights),
            **fields,
        )
        for name, fields in stored.items()
    ]
    if {PACKED_FORMAT, *BYTES_FORMATS} & set(formats):
        schemes.sort(key=lambda scheme: bool(scheme.extra) != (PACKED_FORMAT in formats))
    return schemes


def _rounds_alike(inputs: Any, weights: Mapping[str, Any]) -> bool:
    """Returns True if inputs are rounded to the type of the weights."""
    return isinstance(inputs, Mapping) and all(inputs.get(key) == weights.get(key) for key in ("type", "num_bits"))


LINEAR = "Linear"
"""A class of modules, used instead of a name."""


def _takes_all(group: Mapping[str, Any]) -> bool:
    return LINEAR in (group.get("targets") or (LINEAR,))


def _is_target(targets: Sequence[str], ignored: Sequence[str], module: str) -> bool:
    """Returns True if a module is a target of compressed-tensors: by name, by a pattern of its beginning, or by
    class."""

    def matches(target: str) -> bool:
        return (
            bool(compiled_pattern(target[3:]).match(module)) if target.startswith("re:") else target in (module, LINEAR)
        )

    return any(map(matches, targets)) and not any(map(matches, ignored))


def _compressed_blocks(weights: Mapping[str, Any]) -> tuple[str, Blocks | None]:
    """Returns the blocks in words and as numbers; None if the strategy is not known."""
    strategy, size, block = (weights.get(key) for key in ("strategy", "group_size", "block_structure"))
    if isinstance(block, str):  # as older ones have it: "128x128"
        block = [int(n) if n.isdecimal() and len(n) < 10 else 0 for n in block.split("x")]
    if strategy in ("tensor", "channel"):
        return f"by {strategy}", BY_SCALES
    if strategy in ("group", TENSOR_GROUP) and type(size) is int and size > 0:
        return f"in groups of {size}", (1, size)
    if strategy == "block" and block is not None and is_block(block):
        return f"in blocks of {block[0]}x{block[1]}", (block[0], block[1])
    return "", None
