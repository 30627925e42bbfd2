"""Schemes of MLX, as `mlx_lm.convert` writes them: values packed in words of 32 bits, beside scales of groups.

In the mode `affine` each group has an offset too: a weight is q * scale + offset (documentation of
`mlx.core.quantize`), here in float32, rounded once. The other modes are the OCP Microscaling Formats (v1.0) and NVFP4
without a scale of the tensor.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from tpuconv.encodings.affine import Affine
from tpuconv.encodings.groups import SchemeGroup
from tpuconv.encodings.modelopt import NVFP4_GROUP
from tpuconv.encodings.scheme import E4M3, FP4_FIELDS, MX_GROUP, Scheme
from tpuconv.encodings.words import Words
from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import Optional, check

_OF_MODULE = {
    "group_size": Optional((int, None)),
    "bits": Optional((int, None)),
    "mode": Optional((str, None)),
    "global_scale": Optional((bool, None)),
}
MLX: Mapping[str, Any] = {**_OF_MODULE, "model_type": Optional((str, None))}
"""Which keys of a description are read, and their types. Any other key is the name of a module."""
AFFINE = "affine"
USUAL = {AFFINE: (4, 64), "mxfp4": (4, MX_GROUP), "mxfp8": (8, MX_GROUP), "nvfp4": (4, NVFP4_GROUP)}
"""By mode, the bits and the size of groups of a module whose description does not say them."""
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
_WORD_TYPE = np.dtype(np.uint32)
MODES: Mapping[tuple[str, int, int], Mapping[str, Any]] = {
    ("mxfp4", 4, MX_GROUP): {"title": "MLX MXFP4", **FP4_FIELDS, "per_element": 8, "scale_dtype": "U8"},
    ("mxfp8", 8, MX_GROUP): {
        "title": "MLX MXFP8",
        "qtype": "float8_e4m3fn",
        "table": E4M3,
        "per_element": 4,
        "scale_dtype": "U8",
    },
    ("nvfp4", 4, NVFP4_GROUP): {
        "title": "MLX NVFP4",
        **FP4_FIELDS,
        "per_element": 8,
        "scale_dtype": "F8_E4M3",
        "scales_in_bytes": True,
    },
}
"""The modes without offsets, by name, bits and size of groups."""
SHIFTED_NORMS = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "step3p5")
"""The models whose norms mlx-lm writes with 1 added (`sanitize` of 0.32.2)."""
SWITCHED = re.compile(r"\.experts\.\d+\.")


def mlx_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the groups of a description: modules that it names, and all others. Embeddings and routers are encoded
    too.

    Raises:
        UnsupportedConfig: a mode, number of bits or size of groups that is not implemented, or a model whose other
            weights MLX changes.
        ConfigError: a module has no description.
    """
    if quantization.get("model_type") in SHIFTED_NORMS:
        raise UnsupportedConfig(
            f"MLX's weights of {quantization['model_type']} are not implemented: it adds 1 to the norms",
            hint="convert the release that this one was made from",
        )
    usual = {key: quantization.get(key) for key in _OF_MODULE}
    alike: dict[str, list[str]] = {}
    for name, own in quantization.items():
        if name in MLX or name == "quant_method" or own is None:
            continue
        if own is not False and own is not True:
            check(own, _OF_MODULE, f"config.json, quantization, {name}", ConfigError)
        described = own if own is False else usual if own is True else {"mode": AFFINE, **own}
        alike.setdefault(json.dumps(described, sort_keys=True), []).append(name)
    named = frozenset(name for names in alike.values() for name in names)

    def is_named(names: frozenset[str], module: str) -> bool:
        return module in names or SWITCHED.sub(".switch_mlp.", module) in names

    groups = [
        SchemeGroup((_scheme(json.loads(own)),), partial(is_named, frozenset(names)), looked_up=True)
        for own, names in alike.items()
        if json.loads(own)
    ]
    return (*groups, SchemeGroup((_scheme(usual),), lambda module: not is_named(named, module), looked_up=True))


def _scheme(described: Mapping[str, Any]) -> Scheme:
    mode = described.get("mode") or AFFINE
    usual = USUAL.get(mode, (None, None))
    bits, size = (described.get(key) or own for key, own in zip(("bits", "group_size"), usual, strict=True))
    fields: Mapping[str, Any] | None = None
    if mode == AFFINE and bits in AFFINE_BITS and type(size) is int and size > 0 and size % 32 == 0:
        words = Words(bits, 1, dtype=_WORD_TYPE)
        fields = {
            "title": f"MLX {bits} bits in groups of {size}",
            "qtype": "",
            "table": np.arange(1 << bits, dtype=np.float32),
            "per_element": max(1, 32 // bits),
            "affine": Affine(words, "", words, offsets=".biases"),
            "any_sign": True,
            "scale_dtype": "BF16",
        }
    elif type(bits) is int and type(size) is int and not described.get("global_scale"):
        fields = MODES.get((mode, bits, size))
    if fields is None:
        raise UnsupportedConfig(
            f"MLX with mode={mode!r}, bits={bits!r} and group_size={size!r}"
            + (" and a global_scale" if described.get("global_scale") else "")
            + " is not implemented",
            hint="known are affine with 2, 3, 4, 5, 6 and 8 bits in groups of multiples of 32, mxfp4 and mxfp8 in "
            "groups of 32, and nvfp4 in groups of 16 without global_scale; or decode the weights with MLX: "
            "`mlx_lm.convert --dequantize`",
        )
    return Scheme(values=".weight", scales=".scales", name=".weight", blocks=(1, size), **{**fields, "dtype": "U32"})
