"""The schemes that a checkpoint's `quantization_config` describes, by its `quant_method`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from tpuconv.encodings.auto_round import AUTO_ROUND, AUTO_ROUND_METHODS, auto_round_groups
from tpuconv.encodings.awq_gptq import AWQ, GPTQ, awq_groups, gptq_groups
from tpuconv.encodings.bitnet import BITNET_KEYS, BITNET_METHOD, bitnet_scheme
from tpuconv.encodings.bitsandbytes import BITSANDBYTES, METHOD, bitsandbytes_groups, is_bitsandbytes
from tpuconv.encodings.compressed_tensors import COMPRESSED, compressed_groups
from tpuconv.encodings.groups import NAMES, UNQUANTIZED, SchemeGroup, unless_named
from tpuconv.encodings.mlx import MLX, mlx_groups
from tpuconv.encodings.modelopt import MODELOPT, MODELOPT_NVFP4, modelopt_groups
from tpuconv.encodings.quark import QUARK, QUARK_METHOD, described_layers, quark_groups
from tpuconv.encodings.scheme import (
    BY_SCALES,
    FP4_BY_32,
    FP8_BY_32,
    FP8_SCALES,
    MX_GROUP,
    MXFP4,
    Scheme,
    fp8_scheme,
    is_block,
    is_head,
    mxfp8_scheme,
)
from tpuconv.encodings.torchao import TORCHAO, TORCHAO_METHOD, torchao_groups, torchao_rounds_inputs
from tpuconv.errors import ConfigError, UnsupportedConfig
from tpuconv.jsonfile import Optional, check
from tpuconv.sources.config import MLX_METHOD

METHOD_SCHEMAS: Mapping[Any, Any] = {
    "fp8": {
        "modules_to_not_convert": NAMES,
        "ignored_layers": NAMES,
        "expert_dtype": Optional((str, None)),
        "moe_quant_algo": Optional((str, None)),
    },
    "fbgemm_fp8": {"modules_to_not_convert": NAMES},
    "mxfp4": {"modules_to_not_convert": NAMES},
    "mxfp8": {"modules_to_not_convert": NAMES, "ignored_layers": NAMES, "moe_quant_algo": Optional((str, None))},
    "modelopt": MODELOPT,
    "modelopt_fp4": MODELOPT,
    "compressed-tensors": COMPRESSED,
    "awq": AWQ,
    "gptq": GPTQ,
    **dict.fromkeys(AUTO_ROUND_METHODS, AUTO_ROUND),
    METHOD: BITSANDBYTES,
    QUARK_METHOD: QUARK,
    MLX_METHOD: MLX,
    BITNET_METHOD: BITNET_KEYS,
    TORCHAO_METHOD: TORCHAO,
}
"""For each method, the keys of a description that are read, and their types."""
METHOD_GROUPS: Mapping[Any, Callable[[Mapping[str, Any]], tuple[SchemeGroup, ...]]] = {
    "modelopt": modelopt_groups,
    "modelopt_fp4": modelopt_groups,
    "compressed-tensors": compressed_groups,
    "awq": awq_groups,
    "gptq": gptq_groups,
    **dict.fromkeys(AUTO_ROUND_METHODS, auto_round_groups),
    METHOD: bitsandbytes_groups,
    QUARK_METHOD: quark_groups,
    MLX_METHOD: mlx_groups,
    TORCHAO_METHOD: torchao_groups,
}
"""By method, how groups are made of a description; the others are FP8 and MXFP4 by themselves."""


NOT_READ: Mapping[Any, str] = {
    "hqq": "its groups are parts of the flattened matrix, which are packed across its halves with zero points that "
    "are no integers",
    "quanto": "transformers saves no models with it",
}
"""Why methods that transformers knows are not read."""

NGRAM_TABLES = SchemeGroup((FP8_BY_32,), lambda module: module.endswith(".engram.embed"), looked_up=True)
"""The tables of n-grams beside FP8 in blocks of 32x32 and experts in FP4."""

E4M3_NAMES = ("e4m3", "float8_e4m3fn")
"""The names of the type of numbers in `fmt`; MiniMax writes the second."""


def schemes(quantization: Mapping[str, Any] | None) -> tuple[Scheme, ...]:
    """Returns the schemes that a `quantization_config` describes; none if it is None.

    Raises:
        UnsupportedConfig: its method, format or number of bits is not implemented.
        ConfigError: a value has the wrong type.
    """
    return tuple({scheme.title: scheme for group in groups(quantization) for scheme in group.schemes}.values())


def groups(quantization: Mapping[str, Any] | None) -> tuple[SchemeGroup, ...]:
    """Returns the groups of weights that a `quantization_config` describes. A weight belongs to the first group that
    takes it.

    Raises:
        UnsupportedConfig, ConfigError: see `schemes`.
    """
    if quantization is None:
        return ()
    where = "config.json, quantization_config"
    check(quantization, {"quant_method": Optional((str, None))}, where, ConfigError)
    method = method_of(quantization)
    where = "hf_quant_config.json" if "quantization" in quantization else where
    check(quantization, METHOD_SCHEMAS.get(method, dict), where, ConfigError)
    if method == "fp8":
        other, experts = _unless_named(quantization, _fp8(quantization)), _experts(quantization)
        if experts is None:
            return (other,)
        tables = (NGRAM_TABLES,) if quantization.get("weight_block_size") == [MX_GROUP, MX_GROUP] else ()
        return (SchemeGroup((experts,), lambda module: ".experts." in module), *tables, other)
    if method == "fbgemm_fp8":
        return (_unless_named(quantization, (fp8_scheme("fbgemm FP8", ".weight_scale", BY_SCALES, by_row=True),)),)
    if method == "mxfp4":
        return (_unless_named(quantization, (MXFP4,)),)
    if method == "mxfp8":
        return (_unless_named(quantization, _mxfp8(quantization)),)
    if method == BITNET_METHOD:
        return (_unless_named(quantization, (bitnet_scheme(quantization),)),)
    if method in METHOD_GROUPS:
        return METHOD_GROUPS[method](quantization)
    why = f": {NOT_READ[method]}" if method in NOT_READ else ""
    raise UnsupportedConfig(
        f"the encoding quant_method={method!r} is not implemented{why}",
        hint="known are fp8, fbgemm_fp8, modelopt, mxfp4, mxfp8, compressed-tensors, awq, gptq, auto-round, "
        "bitsandbytes, quark, bitnet and torchao; or convert an unquantized release",
    )


def quantizes_inputs(quantization: Mapping[str, Any] | None) -> bool:
    """Returns True if transformers also rounds the inputs of matrices (W8A8) with this `quantization_config`."""
    if quantization is None:
        return False
    method = quantization.get("quant_method")
    if method == QUARK_METHOD:
        return any(layer.get("input_tensors") for layer in described_layers(quantization))
    if method == TORCHAO_METHOD:
        return torchao_rounds_inputs(quantization)
    config_groups = quantization.get("config_groups")
    described = config_groups.values() if isinstance(config_groups, Mapping) else ()
    rounded = any(isinstance(group, Mapping) and group.get("input_activations") for group in described)
    return rounded or bool(quantization.get("load_in_8bit")) or method == BITNET_METHOD


def method_of(quantization: Mapping[str, Any]) -> Any:
    """Returns the `quant_method`. Older releases of ModelOpt only name themselves as the producer."""
    if is_bitsandbytes(quantization):
        return METHOD
    producer = quantization.get("producer")
    is_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    return quantization.get("quant_method") or ("modelopt" if is_modelopt else None)


def _unless_named(quantization: Mapping[str, Any], schemes: tuple[Scheme, ...]) -> SchemeGroup:
    """Returns all weights except the head and the modules that are named."""
    names = quantization.get("ignored_layers") or quantization.get("modules_to_not_convert") or ()
    group = unless_named(schemes, names, "modules_to_not_convert")
    return replace(group, takes=lambda module: not is_head(module) and group.takes(module))


def _experts(quantization: Mapping[str, Any]) -> Scheme | None:
    """Returns the scheme of the experts beside FP8; None if they are FP8 too. ModelOpt's DeepSeek V4 still has the key
    that says what they were before."""
    algorithm = quantization.get("moe_quant_algo")
    if algorithm == "NVFP4":
        return MODELOPT_NVFP4
    if algorithm is not None:
        raise UnsupportedConfig(
            f"FP8 with moe_quant_algo={algorithm!r} is not implemented, only 'NVFP4'", hint=UNQUANTIZED
        )
    return FP4_BY_32 if quantization.get("expert_dtype") == "fp4" else None


def _fp8(quantization: Mapping[str, Any]) -> tuple[Scheme, ...]:
    block = quantization.get("weight_block_size")
    if (quantization.get("fmt") or E4M3_NAMES[0]) not in E4M3_NAMES:
        raise UnsupportedConfig(
            f"FP8 with fmt={quantization['fmt']!r} is not implemented, only {' or '.join(map(repr, E4M3_NAMES))}",
            hint=UNQUANTIZED,
        )
    if block is None:  # two writers, two names
        return tuple(fp8_scheme(f"FP8, {name} by tensor", f".{name}", BY_SCALES) for name in FP8_SCALES)
    if not is_block(block):
        raise UnsupportedConfig(
            f"FP8 with weight_block_size={block!r} is not implemented, only [rows, columns]", hint=UNQUANTIZED
        )
    title, blocks = f"FP8, blocks of {block[0]}x{block[1]}", (block[0], block[1])
    by_inverse = fp8_scheme(title, ".weight_scale_inv", blocks)
    if quantization.get("expert_dtype") is None:
        of_parameter = replace(by_inverse, title=f"{title}, of all experts", values="", scales="_scale_inv", name="")
        return by_inverse, of_parameter
    return replace(fp8_scheme(f"{title}, scales in powers of two", ".scale", blocks), scale_dtype="F8_E8M0"), by_inverse


def _mxfp8(quantization: Mapping[str, Any]) -> tuple[Scheme, ...]:
    """FP8 with a power of two for each group of inputs; its writers have two names for the scales, as for FP8."""
    for key, known in (("weight_block_size", [1, MX_GROUP]), ("scale_fmt", "ue8m0"), ("moe_quant_algo", "MXFP8")):
        if quantization.get(key) not in (None, known):
            raise UnsupportedConfig(
                f"MXFP8 with {key}={quantization[key]!r} is not implemented, only {known!r}", hint=UNQUANTIZED
            )
    return tuple(mxfp8_scheme(f"MXFP8, {name}", f".{name}") for name in FP8_SCALES)
