"""Schemes as ModelOpt describes them: what that library exports.

NVFP4 has two scales, one in FP8 for each 16 values and one in float32 for the tensor; the names of algorithms are those
of hf_quant_config.json.
"""

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import translate
from functools import partial
from itertools import chain
from typing import Any

from tpuconv.encodings.groups import NAMES, SchemeGroup, compiled_pattern, is_within, pattern_to_check, within
from tpuconv.encodings.scheme import BY_SCALES, FP4_FIELDS, FP8_SCALES, Scheme, fp8_scheme
from tpuconv.errors import UnsupportedConfig
from tpuconv.jsonfile import Each, Optional

ALGORITHM = {"quant_algo": Optional((str, None)), "group_size": Optional((int, None))}
MODELOPT_MODEL = {
    **ALGORITHM,
    "exclude_modules": NAMES,
    "ignore": NAMES,
    "quantized_layers": Optional((Each(ALGORITHM), None)),
}
MODELOPT = {**MODELOPT_MODEL, "quantization": Optional((MODELOPT_MODEL, str))}
NVFP4_GROUP, MX_GROUP = 16, 32
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
MIXED = "MIXED_PRECISION"
MODELOPT_BLOCK = 128


def modelopt_groups(quantization: Mapping[str, Any]) -> tuple[SchemeGroup, ...]:
    """The groups of a ModelOpt description: in config.json, or one level deeper in a file of its own (`read_config`).

    Raises:
        UnsupportedConfig: an algorithm that is not implemented.
    """
    description = quantization.get("quantization", quantization)
    if not isinstance(description, Mapping):
        raise UnsupportedConfig(f"modelopt with quantization={description!r} is not implemented")
    if str(description.get("quant_algo")).upper() != MIXED:
        left_out = {
            name: translate(name) for name in description.get("exclude_modules", description.get("ignore")) or ()
        }

        def takes(module: str) -> bool:
            return not any(compiled_pattern(p).match(outer) for p in left_out.values() for outer in within(module))

        checked = (pattern_to_check("exclude_modules", name, pattern) for name, pattern in left_out.items())
        return (SchemeGroup(_modelopt_schemes(description), takes, tuple(chain.from_iterable(checked))),)
    layers = description.get("quantized_layers")
    if not isinstance(layers, Mapping) or not all(isinstance(layer, Mapping) for layer in layers.values()):
        raise UnsupportedConfig(
            f"modelopt with quant_algo={MIXED!r} and quantized_layers={layers!r} is not implemented"
        )
    alike: dict[tuple[str, str], list[str]] = {}
    for name, layer in layers.items():
        alike.setdefault((str(layer.get("quant_algo")), str(layer.get("group_size"))), []).append(name)
    return tuple(
        SchemeGroup(_modelopt_schemes(layers[names[0]]), partial(is_within, set(names))) for names in alike.values()
    )


def _modelopt_schemes(layer: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """The schemes of a `quant_algo`, of the model or of a layer. Some releases write it in lower case."""
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
        return (replace(fp8_scheme("ModelOpt MXFP8", ".weight_scale", (1, MX_GROUP)), scale_dtype="U8"),)
    if algorithm in ("NVFP4", "W4A16_NVFP4") and size in (None, NVFP4_GROUP):  # the second leaves activations alone
        return (MODELOPT_NVFP4,)
    raise UnsupportedConfig(
        f"the encoding of modelopt with quant_algo={layer.get('quant_algo')!r}"
        + (f" and group_size={size!r}" if size is not None else "")
        + " is not implemented",
        hint="known are FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4 and W4A16_NVFP4 in groups of 16, MXFP8 in "
        f"groups of {MX_GROUP}, and "
        f"{MIXED} of these; or convert an unquantized release",
    )
