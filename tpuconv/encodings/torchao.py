"""Schemes of torchao, as transformers writes its tensors in safetensors: the parts of each under names of their own
(`torchao.prototype.safetensors`). `Float8Tensor`, `Int8Tensor` and `IntxUnpackedToInt8Tensor` are read, of which the
last has integers of fewer bits in bytes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from tpuconv.encodings.groups import NAMES, UNQUANTIZED, SchemeGroup, compiled_pattern, pattern_to_check, unless_named
from tpuconv.encodings.scheme import BY_SCALES, FP8_FIELDS, INT8, Blocks, Scheme, is_head
from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import Optional, check

TORCHAO_METHOD = "torchao"
TORCHAO: Mapping[str, Any] = {
    "modules_to_not_convert": NAMES,
    "quant_type": Optional((dict, str, None)),
}
"""Which keys of a description are read, and their types."""
AO_CONFIG = {"_type": str, "_data": dict}
"""The schema of an object of torchao."""
BY_MODULES = ("FqnToConfig", "ModuleFqnToConfig")
"""Objects that have another one for each module."""
AO_FLOAT8 = ("Float8WeightOnlyConfig", "Float8DynamicActivationFloat8WeightConfig")
AO_INT8 = ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig")
AO_INTX = ("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig")
BYTE_FIELDS: Mapping[str, Any] = {
    "dtype": "I8",
    "qtype": "int8",
    "table": INT8,
    "per_element": 1,
    "zeros": "._weight_zero_point",
    "extra": ("._weight_zero_point",),
}
AO_INTX_KEYS = {
    "dtype": ("int8", "int4", "int3", "int2"),
    "mapping_type": ("SYMMETRIC",),
    "intx_packing_format": ("UNPACKED_TO_INT8",),
}
"""The known values of keys, the defaults first, of integers that lie in bytes."""
NO_HEADER = "no headers of files, in which torchao finds the kinds of tensors"
ALL_OTHERS = "_default"
"""The name of all modules that have no other one."""
AO_ROUNDING = "Activation"
"""In the name of an object that rounds the inputs of matrices too."""


def torchao_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the groups of a description: modules that it names, by name and then by pattern, and all others.

    Raises:
        UnsupportedConfig: a kind of tensors that is not implemented.
        ConfigError: an object of torchao has no type or no data.
    """
    configs = module_configs(quantization)
    patterns = {name: rf"(?:{name[3:]})\Z" for name in configs if name.startswith("re:")}
    left_out = unless_named((), quantization.get("modules_to_not_convert") or (), "modules_to_not_convert")
    checked = tuple(chain.from_iterable(pattern_to_check("quant_type", *pair) for pair in patterns.items()))

    def name_of(module: str) -> str:
        """The name in the description of a module."""
        if module in configs:
            return module
        found = (name for name, pattern in patterns.items() if compiled_pattern(pattern).match(module))
        return next(found, "" if is_head(module) else ALL_OTHERS)

    def takes(own: frozenset[str], module: str) -> bool:
        return left_out.takes(module) and name_of(module) in own

    alike: dict[str, list[str]] = {}
    for name, config in configs.items():
        alike.setdefault(json.dumps(config, sort_keys=True), []).append(name)
    return tuple(
        SchemeGroup(_schemes(json.loads(config)), partial(takes, frozenset(own)), (*left_out.patterns, *checked))
        for config, own in alike.items()
        if json.loads(config)
    )


def module_configs(quantization: Mapping[str, Any]) -> dict[str, Mapping[str, Any] | None]:
    """Returns the objects of torchao in a description, by the names of modules and `ALL_OTHERS`; None for modules that
    are not encoded.

    Raises:
        UnsupportedConfig: a description of older versions, which is a name.
        ConfigError: an object has no type or no data.
    """
    where, kind = "config.json, quantization_config, quant_type", quantization.get("quant_type")
    if not isinstance(kind, Mapping):
        raise UnsupportedConfig(
            f"torchao with quant_type={kind!r} is not implemented: older versions write no safetensors",
            hint="quantize the model again with torchao 0.15 or newer, or convert an unquantized release",
        )
    whole: Any = check(kind.get("default"), AO_CONFIG, f"{where}.default", ConfigError)
    if whole["_type"] not in BY_MODULES:
        return {ALL_OTHERS: whole}
    data = whole["_data"]
    named = data.get("fqn_to_config") or data.get("module_fqn_to_config")
    check(named, dict, where, ConfigError)
    for name, config in named.items():
        check(config, Optional((AO_CONFIG, None)), f"{where}, {name}", ConfigError)
    return dict(named)


def torchao_rounds_inputs(quantization: Mapping[str, Any]) -> bool:
    """Returns True if the inputs of some matrices are rounded too."""
    return any(config and AO_ROUNDING in config["_type"] for config in module_configs(quantization).values())


def _schemes(config: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Returns the scheme of an object of torchao."""
    kind = config["_type"]
    data = {key.removeprefix("weight_"): _plain(value) for key, value in config["_data"].items()}
    found: Scheme | None = None
    if kind in AO_FLOAT8 and data.get("dtype", "float8_e4m3fn") == "float8_e4m3fn":
        found = _scheme("FP8", BY_SCALES, FP8_FIELDS)
    elif kind in AO_INT8 and not data.get("group_size"):
        found = _scheme("INT8", BY_SCALES, BYTE_FIELDS)
    elif kind in AO_INTX and all(data.get(key, known[0]) in known for key, known in AO_INTX_KEYS.items()):
        granularity = data.get("granularity")
        size = granularity.get("group_size") if isinstance(granularity, Mapping) else None
        if size is None:
            found = _scheme("INT8", BY_SCALES, BYTE_FIELDS)
        elif type(size) is int and size > 0:
            found = _scheme(f"INT8 in groups of {size}", (1, size), BYTE_FIELDS)
    if found is None:
        stated = [f"{key}={value!r}" for key, value in sorted(data.items()) if isinstance(value, str | int)]
        raise UnsupportedConfig(
            f"torchao with {kind} ({', '.join(stated)}) is not implemented",
            hint=f"known are {', '.join((*AO_FLOAT8, *AO_INT8, *AO_INTX))}, with symmetric integers in bytes; or "
            f"{UNQUANTIZED}",
        )
    return (replace(found, rounds_inputs=AO_ROUNDING in kind),)


def _plain(value: Any) -> Any:
    """Returns what an object of torchao holds; another value as it is."""
    return value["_data"] if isinstance(value, Mapping) and "_data" in value else value


def _scheme(title: str, blocks: Blocks, fields: Mapping[str, Any]) -> Scheme:
    """Returns the scheme of a tensor by the names of its parts."""
    own = {"values": "._weight_qdata", "scales": "._weight_scale", "name": ".weight"}
    return Scheme(
        **{
            **fields,
            **own,
            "title": f"torchao {title}",
            "blocks": blocks,
            "by_row": blocks == BY_SCALES,
            "unwritten": NO_HEADER,
        }
    )
