"""Schemes as ModelOpt describes them: what that library exports.

NVFP4 has two scales, one in FP8 for each 16 values and one in float32 for the tensor; the names of algorithms come from
hf_quant_config.json. AWQ's int4 (arXiv:2306.00978) has scales of groups, and where no norm before the product could
take it, a scale for each input."""

import re
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import translate
from functools import partial
from itertools import chain
from typing import Any

from tpuconv.encodings.affine import Affine
from tpuconv.encodings.groups import FLAG, NAMES, UNQUANTIZED, SchemeGroup, is_within, pattern_to_check, within
from tpuconv.encodings.scheme import (
    BY_SCALES,
    FP4_FIELDS,
    FP8_SCALES,
    INT4,
    MX_GROUP,
    Scheme,
    fp8_scheme,
    mxfp8_scheme,
)
from tpuconv.encodings.words import BYTE_DTYPE, Words
from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import Each, Optional

ALGORITHM = {
    "quant_algo": Optional((str, None)),
    "group_size": Optional((int, None)),
    "has_zero_point": FLAG,
    "pre_quant_scale": FLAG,
}
MODELOPT_MODEL = {
    **ALGORITHM,
    "exclude_modules": NAMES,
    "ignore": NAMES,
    "quantized_layers": Optional((Each(ALGORITHM), None)),
}
MODELOPT = {**MODELOPT_MODEL, "quantization": Optional((MODELOPT_MODEL, str))}
NVFP4_GROUP = 16
MODELOPT_NVFP4 = Scheme(
    title="ModelOpt NVFP4",
    values=".weight",
    scales=".weight_scale",
    tensor_scale=".weight_scale_2",
    name=".weight",
    blocks=(1, NVFP4_GROUP),
    scale_dtype="F8_E4M3",
    **FP4_FIELDS,
)
INPUT_SCALES = ".pre_quant_scale"
"""Suffix of AWQ's scales of inputs, where no norm before the product could take them."""
NOTHING = r"(?!)"
"""A pattern that matches no name."""
MIXED = "MIXED_PRECISION"
MODELOPT_BLOCK = 128
AWQ_GROUPS = (128, 64, 32, 16, 256)
"""Sizes of groups, of which the shape of the scales tells: config.json does not say it, only the file beside it."""
INT4_IN_BYTES = Words(4, 0, dtype=BYTE_DTYPE)
"""Two rows in one of bytes, the first in the low half, in two's complement (ModelOpt's `pack_int4_in_uint8`)."""
AWQ_ALGORITHMS: Mapping[str, tuple[str, ...]] = {"W4A16_AWQ": (), "W4A8_AWQ": (".weight_scale_2",)}
"""By name, the tensors that are only for activations in FP8: servers bring the weights to the range of FP8 by them."""


def modelopt_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """Returns the groups of a ModelOpt description: in config.json, or one level deeper in a file of its own
    (`read_config`).

    Raises:
        UnsupportedConfig: an algorithm that is not implemented.
    """
    description = quantization.get("quantization", quantization)
    if not isinstance(description, Mapping):
        raise UnsupportedConfig(f"modelopt with quantization={description!r} is not implemented", hint=UNQUANTIZED)
    if str(description.get("quant_algo")).upper() != MIXED:
        left_out = {
            name: translate(name) for name in description.get("exclude_modules", description.get("ignore")) or ()
        }

        # One pattern of all: each of 200,000 modules has several parents, and a description hundreds of names.
        together = re.compile("|".join(left_out.values()) or NOTHING)

        def takes(module: str) -> bool:
            return not any(together.match(outer) for outer in within(module))

        checked = (pattern_to_check("exclude_modules", name, pattern) for name, pattern in left_out.items())
        return (SchemeGroup(_modelopt_schemes(description), takes, tuple(chain.from_iterable(checked))),)
    layers = description.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise UnsupportedConfig(
            f"modelopt with quant_algo={MIXED!r} and quantized_layers={layers!r} is not implemented",
            hint="each layer needs an object with its quant_algo: take the config.json of the release",
        )
    alike: dict[tuple[str, str], list[str]] = {}
    for name, layer in layers.items():
        alike.setdefault((str(layer.get("quant_algo")), str(layer.get("group_size"))), []).append(name)
    return tuple(
        SchemeGroup(_modelopt_schemes(layers[names[0]]), partial(is_within, set(names))) for names in alike.values()
    )


def _modelopt_schemes(layer: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """Returns the schemes of a `quant_algo`, of the model or of a layer. Some releases write it in lower case."""
    size = layer.get("group_size")
    algorithm = str(layer.get("quant_algo")).upper()
    if algorithm in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        return (fp8_scheme("ModelOpt FP8", ".weight_scale", BY_SCALES, by_row=algorithm != "FP8"),)
    if algorithm == "FP8_PB_WO" and (size is None or (type(size) is int and size > 0)):
        n = size or MODELOPT_BLOCK
        return tuple(
            fp8_scheme(f"ModelOpt FP8, {name} of blocks of {n}x{n}", f".{name}", (n, n))
            for name in reversed(FP8_SCALES)
        )
    if algorithm == "MXFP8" and size in (None, MX_GROUP):
        return (mxfp8_scheme("ModelOpt MXFP8", ".weight_scale"),)
    if algorithm in ("NVFP4", "W4A16_NVFP4") and size in (None, NVFP4_GROUP):  # the second leaves activations alone
        return (MODELOPT_NVFP4,)
    if algorithm == "NVFP4_AWQ" and size in (None, NVFP4_GROUP):
        return (replace(MODELOPT_NVFP4, title="ModelOpt NVFP4_AWQ", column_scales=INPUT_SCALES),)
    if algorithm in AWQ_ALGORITHMS and not layer.get("has_zero_point") and (size is None or size > 0):
        return tuple(_awq(algorithm, n) for n in ((size,) if size else AWQ_GROUPS))
    raise UnsupportedConfig(
        f"the encoding of modelopt with quant_algo={layer.get('quant_algo')!r}"
        + (f" and group_size={size!r}" if size is not None else "")
        + (" and zero points" if layer.get("has_zero_point") else "")
        + " is not implemented",
        hint="known are FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4 and NVFP4_AWQ in groups of 16, "
        f"MXFP8 in groups of {MX_GROUP}, W4A16_AWQ and W4A8_AWQ without zero points, and "
        f"{MIXED} of these; or convert an unquantized release",
    )


def _awq(algorithm: str, size: int) -> Scheme:
    return Scheme(
        title=f"ModelOpt {algorithm} in groups of {size}",
        values=".weight",
        scales=".weight_scale",
        name=".weight",
        dtype="U8",
        qtype="int4",
        table=INT4,
        per_element=2,
        blocks=(1, size),
        unused=AWQ_ALGORITHMS[algorithm],
        affine=Affine(INT4_IN_BYTES, "", INT4_IN_BYTES, symmetric=True),
        column_scales=INPUT_SCALES,
    )
