"""Groups of what auto-round (arXiv:2309.05516) writes in a format of its own: the tensors are stored as GPTQ or AWQ
stores them, which `packing_format` tells. Types that are no integers and rounded inputs are refused.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

from tpuconv.encodings.awq_gptq import OVERRIDE, awq_groups, gptq_groups
from tpuconv.encodings.groups import NAME, NAMES, SchemeGroup, compiled_pattern, pattern_to_check, within
from tpuconv.encodings.scheme import Scheme, is_head
from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import Each, Optional

AUTO_ROUND_METHODS = ("auto-round", "intel/auto-round")
"""The names of the method; releases of 2024 have the second."""
BLOCK_NAMES = Optional((str, [str], [[str]], None))
OF_MODULE: Mapping[str, Any] = {
    **OVERRIDE,
    "data_type": Optional((str, None)),
    "act_bits": Optional((int, None)),
}
AUTO_ROUND: Mapping[str, Any] = {
    **OF_MODULE,
    "packing_format": Optional((str, None)),
    "backend": Optional((str, None)),
    "block_name_to_quantize": BLOCK_NAMES,
    "to_quant_block_names": BLOCK_NAMES,
    "modules_to_not_convert": NAMES,
    "extra_config": Optional((Each(OF_MODULE), None)),
}
"""Which keys of a description are read, and their types."""

AROUND = re.compile(r"^(?:(?:model|language_model|thinker)\.)+")
"""The names of the models around a text model."""
PLAIN_BITS = 16
"""From this number on a module is not quantized."""
KERNELS = ("exllama", "exllamav2", "triton", "tritonv2", "marlin", "torch", "qbits", "ipex")
"""The ends of older formats, which say what multiplied and nothing about the tensors."""
PACKINGS: Mapping[tuple[str, ...], tuple[str, str]] = {
    ("auto_round",): ("gptq", "gptq_v2"),
    ("auto_round", "gptqmodel"): ("gptq", "gptq_v2"),
    ("auto_round", "gptq"): ("gptq", "gptq"),
    ("auto_round", "awq"): ("awq", "gemm"),
}
"""By the parts of a format, without kernels and `auto_`: the method, and the version or `checkpoint_format`."""


def auto_round_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the groups of a description: the modules of `extra_config`, by name and then by pattern, and all other
    modules of the blocks.

    Raises:
        UnsupportedConfig: the format, the type or the number of bits is not implemented, or inputs are rounded.
    """
    others = quantization.get("extra_config") or {}
    left_out = quantization.get("modules_to_not_convert") or ()
    names, blocks = {_inside(name): name for name in others}, _blocks(quantization)
    searched = {name: rf"(?s:.*?)(?:{name})" for name in (*others, *left_out) if not NAME.fullmatch(name)}
    searched |= {name: rf"(?s:.*?){re.escape(name)}" for name in left_out if name not in searched}
    checked = tuple(
        chain.from_iterable(pattern_to_check("extra_config", name, pattern) for name, pattern in searched.items())
    )

    def matches(name: str, module: str) -> bool:
        return bool(compiled_pattern(searched[name]).match(module))

    @cache
    def entry_of(module: str) -> str:
        """The name or the pattern in `extra_config` of a module; an empty one if it has none."""
        named = next((names[name] for name in within(_inside(module)) if name in names), None)
        return named or next((name for name in others if name in searched and matches(name, module)), "")

    def takes(entries: Collection[str], module: str) -> bool:
        entry = entry_of(module)
        if entry not in entries or any(matches(name, module) for name in left_out):
            return False
        return bool(entry) or (not is_head(module) and _inside(module).startswith(blocks))

    alike: dict[str, list[str]] = {}
    for name, own in others.items():
        alike.setdefault(json.dumps(own, sort_keys=True), []).append(name)
    kinds = [(others[names[0]], names) for names in alike.values() if _is_quantized(others[names[0]])]
    return tuple(
        SchemeGroup(_schemes({**quantization, **own}), partial(takes, frozenset(names)), checked)
        for own, names in (*kinds, ({}, [""]))
    )


def _blocks(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the beginnings of the names of modules in blocks that are quantized; one that is empty for all blocks."""
    named = quantization.get("block_name_to_quantize") or quantization.get("to_quant_block_names") or ""
    lists = [named.split(",")] if isinstance(named, str) else [[x] if isinstance(x, str) else x for x in named]
    return tuple(_inside(name.strip()) for name in chain.from_iterable(lists))


def _inside(name: str) -> str:
    """Returns the name of a module without the models around it: files have other ones than modules, so that
    the description of a multimodal model may say more."""
    return AROUND.sub("", name, count=1)


def _is_quantized(own: Mapping[str, Any]) -> bool:
    """Returns False for an entry of `extra_config` of modules that stay as they are."""
    return (own.get("bits") or 0) < PLAIN_BITS and own.get("data_type") != "float"


def _schemes(described: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Returns the scheme of modules with this description."""
    described = {key: value for key, value in described.items() if value is not None}
    method, form = _format(described)
    if method == "awq":
        is_affine = described.get("sym", True) is False
        (group,) = awq_groups({**_of_module(described), "version": form, "zero_point": is_affine})
        return group.schemes
    (group,) = gptq_groups({**_of_module(described), "checkpoint_format": form})
    has_index = described.get("packing_format", "").endswith("gptqmodel")
    return tuple(
        replace(scheme, affine=replace(scheme.affine, writes_index=has_index)) if scheme.affine else scheme
        for scheme in group.schemes
    )


def _of_module(described: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in described.items() if key in OVERRIDE}


def _format(described: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the value of `PACKINGS` for a description without nulls.

    Raises:
        UnsupportedConfig: it has none.
    """
    backend = described.get("backend") or ""
    packing = described.get("packing_format") or (backend if backend.startswith("auto_round") else "auto")
    parts = tuple(part.removeprefix("auto_") if i else part for i, part in enumerate(packing.split(":")))
    found = PACKINGS.get(("auto_round", "gptq") if packing == "auto" else tuple(p for p in parts if p not in KERNELS))
    inputs = described.get("act_bits") or PLAIN_BITS
    kind = described.get("data_type") or "int"
    if found is None or kind != "int" or inputs < PLAIN_BITS or described.get("rotation_config"):
        raise UnsupportedConfig(
            f"auto-round with packing_format={packing!r}, data_type={kind!r} and act_bits={inputs} is not implemented"
            + (", nor are its rotations" if described.get("rotation_config") else ""),
            hint="known are integers in the formats auto_round, auto_round:auto_gptq, auto_round:gptqmodel and "
            "auto_round:auto_awq, with inputs that are not rounded; or convert an unquantized release",
        )
    return found
