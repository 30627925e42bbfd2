"""Turns a quantization config into the encoders of a plan."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tpuconv.checkpoint.reader import Checkpoint
from tpuconv.convert.plan.quantization import FoundArray, Quantization
from tpuconv.convert.plan.types import Plan
from tpuconv.convert.run.describe import planned_manifest
from tpuconv.encodings.adapted import Adapted
from tpuconv.encodings.decode import Tensor
from tpuconv.encodings.scheme import MX_GROUP, MX_TYPES, POWERS_OF_TWO
from tpuconv.errors import ConfigError, UnsupportedConfig, UsageError
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.periods import LayerStacks
from tpuconv.models.registry import Family
from tpuconv.quantize.calibration_settings import Calibration
from tpuconv.quantize.config import MTP_MODULE, QuantConfig
from tpuconv.quantize.matches import check_rules
from tpuconv.quantize.report import report_page
from tpuconv.text import format_count

if TYPE_CHECKING:
    from tpuconv.quantize.calibrate.data import CalibrationData
    from tpuconv.quantize.calibrate.run import LayerwiseCalibration
    from tpuconv.quantize.encode import QwixEncoder
    from tpuconv.quantize.rules import ParamQuant

HEAD_KERNEL = "lm_head.kernel"
HEAD_NOTE = (
    "lm_head stays as it is: tpu-inference reads no quantized head; a rule for `lm_head` alone quantizes it, for vLLM"
)


def quantization(
    plain: Plan,
    family: Family,
    config: DecoderConfig,
    rules: QuantConfig,
    data: "CalibrationData | None" = None,
    notes: Sequence[str] = (),
    *,
    for_servers: bool = False,
) -> Quantization:
    """Returns the quantization of the parameters of an unquantized plan by rules.

    Args:
        plain: the plan.
        family: of the model.
        config: the family's reading of config.json.
        rules: the quantization config.
        data: what to calibrate on; needed if the config has a calibration.
        notes: for the manifest, before others.
        for_servers: leave out a head whose rule is for other parameters too: most servers take no quantized one.

    Raises:
        ConfigError: a pattern of the rules is invalid or too slow, which is found before jax is imported; a rule
            quantizes inputs in float16; or see `tpuconv.quantize.rules.resolve_rules`.
        UnsupportedConfig: stacked layers are not quantized alike, or only some layers are converted.
    """
    plain.check()
    if plain.options.layers is not None:
        raise UnsupportedConfig("a part of the layers cannot be quantized", hint="leave `layers=` out")
    notes = list(notes)
    if rules.target_bits is not None:
        rules = _chosen_rules(rules, plain, family, config, for_servers=for_servers)
        notes.append(rules.summary)
    check_rules(rules, family.table_without_release(plain.table.returns, config.parts).modules(config))
    from tpuconv.quantize.rules import ModelBuilder, resolve_rules

    stacks = config.stacks if plain.options.scan_layers else None
    mtp = plain.options.include_mtp and rules.names_part(MTP_MODULE)
    if mtp and rules.calibration is not None:
        raise ConfigError(
            f"{rules.name} has a calibration, which does not run the module for multi-token prediction",
            hint="leave out the rule for mtp, or the calibration",
        )
    quants = resolve_rules(ModelBuilder(family.model_class, config, mtp), rules, stacks)
    if for_servers and _is_by_the_way(HEAD_KERNEL, quants):
        del quants[HEAD_KERNEL]
        notes.append(HEAD_NOTE)
    if not for_servers:
        _check_inputs(plain, quants, rules)
    passthrough = _passthrough(plain, quants)
    notes += _notes_on_blocks(plain, passthrough, rules)
    encoders = _encoders(plain, {name: quant for name, quant in quants.items() if name not in passthrough}, rules)
    facts = {**rules.to_json(), "qwix": version("qwix"), **({"notes": notes} if notes else {})}
    if rules.calibration is None:
        return Quantization(encoders, facts, report_page, passthrough)
    if data is None:
        later = ", then `tpuconv export` its output" if for_servers else ""
        raise UsageError(
            f"{rules.name} has a calibration, which runs the model before it is quantized",
            hint=f"give the source to `tpuconv quantize` instead{later}",
        )
    calibration = _calibration(plain, family, config, rules.calibration, data, encoders, stacks)
    facts["calibration_data"] = data.to_json()
    return Quantization(encoders, facts, report_page, passthrough, calibration, dict(calibration.found_arrays))


def _encoders(plain: Plan, quants: "Mapping[str, ParamQuant]", rules: QuantConfig) -> "dict[str, QwixEncoder]":
    """Returns the encoders of parameters, compiled."""
    import jax.numpy as jnp

    from tpuconv.quantize.encode import QwixEncoder, prepare

    encoders = {}
    for name, quant in quants.items():
        dtype = plain.arrays[name].dtype
        scale_dtype = dtype if rules.scale_dtype is None else jnp.dtype(rules.scale_dtype)
        encoders[name] = QwixEncoder(name, quant, dtype, np.dtype(scale_dtype))
    prepare(encoders.values())
    return encoders


def _calibration(
    plain: Plan,
    family: Family,
    config: DecoderConfig,
    asked: Calibration,
    data: "CalibrationData",
    encoders: "Mapping[str, QwixEncoder]",
    stacks: LayerStacks | None,
) -> "LayerwiseCalibration":
    """Returns the calibration of encoders on data, and of scales of keys and values if these are asked for."""
    import jax.numpy as jnp
    from flax import nnx

    from tpuconv.quantize.cache_scales import scale_arrays, scale_counts
    from tpuconv.quantize.calibrate.distill import check_distilled
    from tpuconv.quantize.calibrate.run import LayerwiseCalibration

    if asked.distill:
        check_distilled(config, encoders)
    stored = plain.source if isinstance(plain.source, Checkpoint) else None
    manifest = stored.manifest if stored else planned_manifest(plain)
    cached: Mapping[str, FoundArray] = {}
    if asked.kv_cache:
        model = nnx.eval_shape(lambda: family.model_class(config, dtype=jnp.bfloat16))
        cached = scale_arrays(manifest, scale_counts(model, asked.kv_cache), stacks)
    heads = config.num_attention_heads
    return LayerwiseCalibration(manifest, encoders, asked, data, heads, cached, plan=None if stored else plain)


def _chosen_rules(
    rules: QuantConfig, plain: Plan, family: Family, config: DecoderConfig, *, for_servers: bool
) -> QuantConfig:
    """Returns the rules for the number of bits of a config."""
    from tpuconv.quantize.recipe.roles import recipe_for_bits
    from tpuconv.quantize.rules import ModelBuilder

    largest = max(plain.arrays.values(), key=lambda array: prod(array.shape))
    released = _released_in("mxfp4", plain)
    stacks = None
    if plain.options.scan_layers:
        stacks = config.stacks
        released = {name for array in released for name, _ in stacks.names_in(array)}
    return recipe_for_bits(
        rules,
        ModelBuilder(family.model_class, config),
        stacks,
        scale_bits=8 * largest.dtype.itemsize,
        released=released,
        for_servers=for_servers,
    )


def _check_inputs(plain: Plan, quants: "Mapping[str, ParamQuant]", rules: QuantConfig) -> None:
    """Raises ConfigError if inputs in float16 would be quantized: Qwix casts sums of products to the dtype of the
    inputs before it multiplies them by scales, and they are beyond 65,504."""
    is_narrow = {name for name in quants if plain.arrays[name].dtype == np.float16}
    found = [rules.rules[quants[name].rule] for name in sorted(is_narrow)]
    if lines := {rule.line for rule in found if rule.act_qtype is not None}:
        raise ConfigError(
            f"act_qtype of {rules.name}, line {', '.join(map(str, sorted(lines)))}, cannot be used with a model in "
            "float16: its products overflow",
            hint='convert the model by `dtype="bfloat16"` first, or for servers quantize the release by '
            '`target="huggingface"`; rules without act_qtype quantize float16 as it is',
        )


def _is_by_the_way(name: str, quants: "Mapping[str, ParamQuant]") -> bool:
    """Returns whether a parameter is quantized by a rule that other parameters are quantized by too."""
    return name in quants and any(other != name and quants[other].rule == quants[name].rule for other in quants)


def _passthrough(plain: Plan, quants: "Mapping[str, ParamQuant]") -> dict[str, int]:
    """Returns the parameters that the source has in exactly the type that is asked for, row by row, with the numbers of
    their rules."""
    passthrough: dict[str, int] = {}
    for binding in plain.bindings:
        tensors = [plain.tensors[name] for stack in binding.src for name in stack.names]
        names = [name for stack in binding.dst for name in stack.names]
        if all(name in quants and _is_type_of(quants[name], tensor) for name in names for tensor in tensors):
            passthrough |= {name: quants[name].rule for name in names}
    return passthrough


def _notes_on_blocks(plain: Plan, passthrough: Mapping[str, int], rules: QuantConfig) -> Iterator[str]:
    """Yields a note for each size of blocks that parameters keep, though their rules ask for scales of outputs."""
    counts: dict[tuple[str, tuple[int | None, ...]], int] = {}
    for binding in plain.bindings:
        scheme = plain.tensors[binding.src[0].names[0]].scheme
        names = [name for stack in binding.dst for name in stack.names if name in passthrough]
        asked = [name for name in names if rules.rules[passthrough[name]].tile_axes != "block"]
        if asked and scheme is not None and scheme.blocks[0] not in (None, 1):
            key = scheme.qtype, tuple(scheme.blocks)
            counts[key] = counts.get(key, 0) + len(asked)
    for (qtype, blocks), count in counts.items():
        size = "x".join(map(str, blocks))
        kept = "keeps its values" if count == 1 else "keep their values"
        yield f"{format_count(count, 'parameter')} {kept} of the release: {qtype} with a scale for each block of {size}"


def _released_in(qtype: str, plain: Plan) -> set[str]:
    """Returns the parameters that the source has in a type."""
    return {
        name
        for binding in plain.bindings
        if all(qtype in _types(plain.tensors[tensor]) for stack in binding.src for tensor in stack.names)
        for stack in binding.dst
        for name in stack.names
    }


def _is_type_of(quant: "ParamQuant", tensor: Tensor) -> bool:
    symmetric = str(quant.qwix_how.calibration_method).startswith(("absmax", "rms"))
    return symmetric and quant.qtype in _types(tensor)


def _types(tensor: Tensor) -> tuple[str, ...]:
    """Returns the types that the encoded values of a tensor can be copied to."""
    if isinstance(tensor, Adapted) or tensor.scheme is None or tensor.scales is None or tensor.tensor_scale is not None:
        return ()
    if tensor.column_scales is not None or not tensor.scheme.has_blocks_of_rows(tensor.shape, tensor.scales.shape):
        return ()
    if tensor.scheme.affine and (not tensor.scheme.affine.symmetric or tensor.scheme.affine.any_order):
        return ()
    if tensor.scheme.blocks == (1, MX_GROUP) and tensor.scales.dtype in POWERS_OF_TWO:
        return tensor.scheme.qtype, MX_TYPES[tensor.scheme.qtype]
    return (tensor.scheme.qtype,)
