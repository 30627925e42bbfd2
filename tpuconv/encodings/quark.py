"""Schemes as AMD Quark describes them: the safetensors that library exports.

Each module has the description of the first pattern in `layer_quant_config` that it matches, else the one of its
class, else the global one. MXFP4 and MXFP8 are the OCP Microscaling Formats (v1.0); integers in groups are packed as
AWQ packs them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import translate
from functools import partial
from itertools import chain
from typing import Any

from tpuconv.encodings.affine import Affine
from tpuconv.encodings.awq_gptq import AWQ_ORDER
from tpuconv.encodings.groups import NAME, NAMES, TEXT, UNQUANTIZED, SchemeGroup, compiled_pattern, pattern_to_check
from tpuconv.encodings.modelopt import MODELOPT_NVFP4, NVFP4_GROUP
from tpuconv.encodings.scheme import (
    BY_SCALES,
    FP4_FIELDS,
    INT4,
    INT8,
    MX_GROUP,
    Blocks,
    Scheme,
    fp8_scheme,
    is_block,
    mxfp8_scheme,
)
from tpuconv.encodings.words import Words
from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import Each, Optional

QUARK_STAGE = {
    **dict.fromkeys(("dtype", "qscheme", "scale_format", "scale_type", "zero_point_type"), TEXT),
    **dict.fromkeys(("ch_axis", "group_size"), Optional((int, None))),
    "block_size": Optional(([int], None)),
    "symmetric": Optional((bool, None)),
}
QUARK_LAYER = {key: Optional((QUARK_STAGE, [QUARK_STAGE], None)) for key in ("weight", "input_tensors")}
QUARK: Mapping[str, Any] = {
    "global_quant_config": Optional((QUARK_LAYER, None)),
    "layer_quant_config": Optional((Each(QUARK_LAYER), None)),
    "layer_type_quant_config": Optional((Each(QUARK_LAYER), None)),
    "exclude": NAMES,
    "algo_config": Optional(([dict], dict, None)),
    "export": Optional(({"pack_method": TEXT, "weight_format": TEXT}, None)),
}
"""Which keys of a description are read, and their types."""

QUARK_METHOD = "quark"
_SCALES, _ZERO_POINTS = ".weight_scale", ".weight_zero_point"
PACK_ORDERS: Mapping[str, tuple[int, ...]] = {"reorder": AWQ_ORDER, "order": ()}
"""By `pack_method`, the place of each nibble of a word among eight outputs."""
E8M0 = {"scale_format": "e8m0", "group_size": MX_GROUP}
"""The scales of the OCP Microscaling Formats, in a description."""
E8M0_BLOCKS = "float8_e8m0fnu"
"""The `scale_type` of blocks whose scales are powers of two."""


def quark_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the groups of a Quark description: of `layer_quant_config`, and all other modules.

    Raises:
        UnsupportedConfig: an encoding that is not implemented, an algorithm that changes more than weights, or weights
            that are stored as they were.
    """
    _check_form(quantization)
    of_layers = dict(quantization.get("layer_quant_config") or {})
    patterns = {name: translate(name) for name in of_layers}
    names = quantization.get("exclude") or ()
    excluded = {name: name[3:] if name.startswith("re:") else translate(name) for name in names}
    exact = {name for name in names if NAME.fullmatch(name)}  # thousands of names, for 200,000 modules
    left_out = [pattern for name, pattern in excluded.items() if name not in exact]
    of_class = (quantization.get("layer_type_quant_config") or {}).get("Linear")
    others = of_class or quantization.get("global_quant_config")
    checked = (
        *chain.from_iterable(pattern_to_check("exclude", *pair) for pair in excluded.items()),
        *chain.from_iterable(pattern_to_check("layer_quant_config", *pair) for pair in patterns.items()),
    )

    def layer_of(module: str) -> str:
        """The pattern that a module matches; an empty one if it matches none."""
        return next((name for name, pattern in patterns.items() if compiled_pattern(pattern).match(module)), "")

    def takes(own: frozenset[str], module: str) -> bool:
        is_left_out = module in exact or any(compiled_pattern(pattern).match(module) for pattern in left_out)
        return not is_left_out and layer_of(module) in own

    alike: dict[str, list[str]] = {}
    for name, layer in {**of_layers, "": others or {}}.items():
        alike.setdefault(json.dumps(layer.get("weight"), sort_keys=True), []).append(name)
    order = (quantization.get("export") or {}).get("pack_method") or "reorder"
    out = [
        SchemeGroup((_scheme(json.loads(weight), order),), partial(takes, frozenset(own)), checked)
        for weight, own in alike.items()
        if json.loads(weight)
    ]
    if not out:
        raise UnsupportedConfig(
            "Quark with weight=None everywhere is not implemented: no weight is quantized",
            hint="remove quantization_config from config.json",
        )
    return tuple(out)


def described_layers(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the descriptions of layers in a description: each has the encodings of `weight` and `input_tensors`."""
    named = (quantization.get(key) or {} for key in ("layer_quant_config", "layer_type_quant_config"))
    layers = (quantization.get("global_quant_config"), *chain.from_iterable(each.values() for each in named))
    return [layer for layer in layers if layer]


def _check_form(quantization: Mapping[str, Any]) -> None:
    """Raises UnsupportedConfig if weights are not stored encoded, or an algorithm changes more than weights."""
    stored_as = (quantization.get("export") or {}).get("weight_format")
    if stored_as not in (None, "real_quantized"):
        raise UnsupportedConfig(
            f"Quark with weight_format={stored_as!r} is not implemented: its weights are rounded, and stored plain",
            hint="export the model again with weight_format='real_quantized'; or convert an unquantized release",
        )
    algorithms = quantization.get("algo_config") or ()
    for algorithm in [algorithms] if isinstance(algorithms, Mapping) else algorithms:  # older versions have one
        name = algorithm.get("name")
        is_online = algorithm.get("online_r1_rotation") or algorithm.get("r4")
        if name == "svdquant" or (name == "rotation" and is_online):
            raise UnsupportedConfig(
                f"Quark with algorithm {name!r} is not implemented: it changes the inputs of matrices, which the model "
                "has no step for",
                hint=UNQUANTIZED,
            )


def _scheme(weight: Any, order: str) -> Scheme:
    """Returns the scheme of a `weight`: one stage, or a list of stages."""
    stages = weight if isinstance(weight, list) else [weight]
    found = _one_stage(stages[0], order) if len(stages) == 1 else _two_stages(stages)
    if found is None:
        keys = ("dtype", "qscheme", "ch_axis", "group_size", "block_size", "symmetric", "scale_format")
        stated = [
            {key: stage[key] for key in (*keys, "zero_point_type") if stage.get(key) is not None} for stage in stages
        ]
        words = [", ".join(f"{key}={value!r}" for key, value in stage.items()) for stage in stated]
        raise UnsupportedConfig(
            f"Quark with {' and '.join(words)}"
            + (f" in {len(stages)} stages" if len(stages) > 1 else "")
            + " is not implemented",
            hint="known are fp8_e4m3 by tensor, channel 0 or block, MXFP8, MXFP4, NVFP4, symmetric int8 by tensor or "
            "channel 0, and int4 and uint4 in groups; or convert an unquantized release",
        )
    return found


def _one_stage(weight: Mapping[str, Any], order: str) -> Scheme | None:
    dtype, qscheme, size = (weight.get(key) for key in ("dtype", "qscheme", "group_size"))
    is_mx = qscheme == "per_group" and all(weight.get(key) == value for key, value in E8M0.items())
    if dtype == "fp4" and is_mx:
        return Scheme(
            "Quark MXFP4", ".weight", _SCALES, ".weight", blocks=(1, MX_GROUP), scale_dtype="U8", **FP4_FIELDS
        )
    if dtype == "fp8_e4m3" and is_mx:
        return mxfp8_scheme("Quark MXFP8", _SCALES)
    if dtype == "fp8_e4m3" and (found := _blocks(weight)) is not None:
        by, blocks, by_row = found
        scheme = fp8_scheme(f"Quark FP8 {by}", _SCALES, blocks, by_row=by_row)
        return replace(scheme, scale_dtype="F8_E8M0" if weight.get("scale_type") == E8M0_BLOCKS else "BF16")
    symmetric, in_integers = weight.get("symmetric"), weight.get("zero_point_type") in (None, "int32")
    if dtype == "int8" and symmetric is True and (found := _blocks(weight)) is not None and found[1] == BY_SCALES:
        return Scheme(
            title=f"Quark INT8 {found[0]}",
            values=".weight",
            scales=_SCALES,
            name=".weight",
            dtype="I8",
            qtype="int8",
            table=INT8,
            per_element=1,
            blocks=BY_SCALES,
            zeros=_ZERO_POINTS,
            extra=(_ZERO_POINTS,),
            scale_dtype="BF16" if found[2] else "F32",
            by_row=found[2],
        )
    is_group = (
        qscheme == "per_group" and weight.get("ch_axis") in (None, 1, -1) and in_integers and order in PACK_ORDERS
    )
    if (dtype, symmetric) in (("int4", True), ("uint4", False)) and is_group and type(size) is int and size > 0:
        return _in_words(str(dtype).upper(), size, PACK_ORDERS[order])
    return None


def _in_words(name: str, size: int, order: tuple[int, ...]) -> Scheme:
    """Returns a scheme of matrices [in, out], eight outputs in a word: unsigned with zero points, or in two's
    complement with zero points that are 0."""
    words, signed = Words(4, 1, order), not name.startswith("U")
    affine = Affine(words, "" if signed else _ZERO_POINTS, words, symmetric=signed)
    return Scheme(
        title=f"Quark {name} in groups of {size}",
        values=".weight",
        scales=_SCALES,
        name=".weight",
        dtype="I32",
        qtype="int4",
        table=INT4,
        per_element=8,
        blocks=(size, 1),
        affine=affine,
        any_sign=True,
        input_first=True,
        scale_dtype="BF16",
        zeros=_ZERO_POINTS if signed else "",
        extra=(_ZERO_POINTS,) if signed else (),
    )


def _blocks(weight: Mapping[str, Any]) -> tuple[str, Blocks, bool] | None:
    """Returns the values that share a scale, in words and as numbers, and whether each row has one; None if that is not
    known."""
    qscheme, block = weight.get("qscheme"), weight.get("block_size")
    if qscheme == "per_tensor":
        return "by tensor", BY_SCALES, False
    if qscheme == "per_channel" and weight.get("ch_axis") == 0:
        return "by channel", BY_SCALES, True
    if qscheme == "per_block" and block is not None and is_block(block):
        return f"in blocks of {block[0]}x{block[1]}", (block[0], block[1]), False
    return None


def _two_stages(stages: list[Mapping[str, Any]]) -> Scheme | None:
    """Returns NVFP4: FP4 in groups of 16, whose scales are FP8 with one more scale of the tensor."""
    first, second = stages[0], stages[-1]
    is_group = (first.get("dtype"), first.get("qscheme"), first.get("group_size")) == ("fp4", "per_group", NVFP4_GROUP)
    is_tensor = (second.get("dtype"), second.get("qscheme")) == ("fp8_e4m3", "per_tensor")
    return replace(MODELOPT_NVFP4, title="Quark NVFP4") if len(stages) == 2 and is_group and is_tensor else None
