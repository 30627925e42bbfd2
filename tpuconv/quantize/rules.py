"""Which parameters a config quantizes, and how. Qwix itself decides, on the model with shapes instead of arrays."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tpuconv.checkpoint.manifest import AS_RELEASED
from tpuconv.encodings.passthrough_rows import Stored
from tpuconv.errors import ConfigError, CorruptOutput, UnsupportedConfig
from tpuconv.forks import check_no_fork
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.common.periods import LayerStacks
from tpuconv.names import QVALUE, SCALE, ZERO_POINT, collapse
from tpuconv.notation.layout import Shape
from tpuconv.notation.table import MTP_PARAMETERS
from tpuconv.private import flax_util, ptq, qarray
from tpuconv.quantize.cache_scales import add_scales, scale_counts
from tpuconv.quantize.config import MSE, NAMED_ALONE, QuantConfig, Rule, config_names
from tpuconv.quantize.input_scale import InputScale, input_scales
from tpuconv.quantize.matches import check_parts, check_rules, check_used
from tpuconv.quantize.provider import Provider, quantized

LAYER = re.compile(r"layers[./](\d+)[./](.*)")
"""The name of a layer's parameter or module: the number of the layer, and the name within it."""


@dataclass(frozen=True)
class ParamQuant:
    """The quantization of one parameter.

    Attributes:
        group_shape: how many elements of each axis share a scale.
        rule: the number of the rule.
        qwix_how: Qwix's `HowToQuantize`; of one layer if layers are stacked.
        summed: the axes that the product sums over; of one layer if layers are stacked.
        input_scale: the static scale of the product's input, if it has one.
    """

    shape: tuple[int, ...]
    group_shape: tuple[int, ...]
    rule: int
    qwix_how: Any
    summed: tuple[int, ...] = ()
    input_scale: InputScale | None = None

    @property
    def qtype(self) -> str:
        """The type of the quantized values."""
        return str(self.qwix_how.qtype)


def passthrough_rules(passthrough: Mapping[str, Mapping[str, Any]], stacks: LayerStacks | None = None) -> QuantConfig:
    """Returns a config that quantizes exactly the modules of these parameters, each to the type that it is encoded in.
    The scales come from the checkpoint, not from Qwix. `stacks` says which layers the names belong to, if some are
    stacked."""
    layers: dict[str, list[str]] = {}
    for layer in range(stacks.layers if stacks else 0):
        assert stacks is not None
        layers.setdefault(stacks.find(layer)[0].replace(".", "/"), []).append(str(layer))
    modules: dict[tuple[str, str, str], list[str]] = {}
    for name, facts in passthrough.items():
        path = re.escape("/".join(name.split(".")[:-1]))
        for prefix, numbers in layers.items():
            if path.startswith(f"{prefix}/"):
                path = f"layers/({'|'.join(numbers)}){path.removeprefix(prefix)}"
                break
        method = "minmax" if facts.get("zero_points") else "absmax"
        part = name.partition(".")[0]
        modules.setdefault((facts["qtype"], method, part if part in NAMED_ALONE else ""), []).append(path)
    rules = [
        Rule(0, module_path="|".join(paths), weight_qtype=qtype, weight_calibration_method=method)
        for (qtype, method, _), paths in modules.items()
    ]
    return QuantConfig(AS_RELEASED, "", tuple(rules))


def abstract_quantized_model(
    build: Callable[[], Any], quantization: Mapping[str, Any], stacks: LayerStacks | None = None
) -> Any:
    """Returns the model with shapes instead of arrays, quantized as a manifest says: by rules, or encoded as it was
    released.

    Args:
        build: makes the model with separate layers, which rules name.
        quantization: of the manifest.
        stacks: how the layers are stacked then, as in the checkpoint; by default they are not.

    Raises:
        ConfigError: the pattern of a rule is invalid, or takes too long.
        CorruptOutput: the manifest has a parameter that the model lacks.
    """
    passthrough = {name: facts for name, facts in quantization.get("parameters", {}).items() if "kept" in facts}
    config = QuantConfig.from_json(quantization) if "rules" in quantization else passthrough_rules(passthrough, stacks)

    def traced() -> Any:
        model = build()
        if "rules" in quantization:  # others are names, escaped
            check_rules(config, _modules(model))
        model = quantized(model, Provider(config))
        if kv_cache := quantization.get("calibration", {}).get("kv_cache"):
            add_scales(model, scale_counts(model, kv_cache))
        if stacks is not None:
            model.stack_layers()
        return model

    graphdef, state = nnx.split(nnx.eval_shape(traced))
    flat = {".".join(map(str, path)): (path, value) for path, value in nnx.to_flat_state(state)}
    ours = {i for i, rule in enumerate(config.rules) if rule.tile_axes != "last"} if "rules" in quantization else set()
    tiled_by_us = {n: facts for n, facts in quantization.get("parameters", {}).items() if facts.get("rule") in ours}
    lacks_mtp = not any(name.startswith(MTP_PARAMETERS) for name in flat)  # its arrays may be stored all the same
    for name, facts in (passthrough | tiled_by_us).items():  # scales of their own, whatever Qwix would make
        if lacks_mtp and name.startswith(MTP_PARAMETERS):
            continue
        known = {name + SCALE, name + QVALUE} <= flat.keys() and facts.get("stored", True)
        if not known or len(facts["tiles"]) != flat[name + QVALUE][1].ndim:
            raise CorruptOutput(f"the manifest has {name} quantized, and the model has no such parameter")
        qvalues = flat[name + QVALUE][1].shape
        shape = tuple(n // tile for n, tile in zip(qvalues, facts["tiles"], strict=True))
        for part in (SCALE, ZERO_POINT) if name + ZERO_POINT in flat else (SCALE,):
            path, value = flat[name + part]
            dtype = value.dtype
            if "stored" in facts and part == SCALE:
                dtype = jnp.promote_types(Stored.from_json(facts["stored"][0]).scale_dtype, dtype)
            flat[name + part] = path, value.replace(jax.ShapeDtypeStruct(shape, dtype))  # type: ignore[no-untyped-call]
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.values())))


@dataclass(frozen=True)
class ModelBuilder:
    """Makes a model with separate layers in bfloat16; with `mtp` and its module for multi-token prediction."""

    model_class: Callable[..., Any]
    config: DecoderConfig
    mtp: bool = False

    def __call__(self) -> Any:
        model = self.model_class(self.config, dtype=jnp.bfloat16)
        if self.mtp:
            model.add_mtp()
        return model


def resolve_rules(
    build: Callable[[], Any], config: QuantConfig, stacks: LayerStacks | None = None
) -> dict[str, ParamQuant]:
    """Returns the quantization of every parameter that a config quantizes.

    Args:
        build: makes the model with separate layers.
        config: the rules.
        stacks: how layers are stacked; the result then is by the names of their arrays. By default they are not.

    Returns:
        By the name of the parameter.

    Raises:
        ConfigError: a rule has no effect, takes too long, has a tile size that does not divide an axis, a static
            scale for other products than of each token with weights, or activations of an encoder.
        UnsupportedConfig: layers that are stacked are not quantized alike.
        UsageError: this process was forked from one in which jax runs.
    """
    check_no_fork()
    return dict(_resolved(build, QuantConfig(config.name, "", config.rules), stacks))


@lru_cache(maxsize=8)  # a command may ask several times: to choose rules, for a plan, and to carry it out
def _resolved(build: Callable[[], Any], config: QuantConfig, stacks: LayerStacks | None) -> dict[str, ParamQuant]:
    provider = Provider(config)
    param_quants: dict[str, ParamQuant] = {}

    def trace() -> None:
        model = build()
        check_rules(config, _modules(model))
        if isinstance(model, Decoder):  # whose layers are known
            check_parts(config, model.config.parts)
            _skip_repeated(model, config)
        model = quantized(model, provider)
        scales = input_scales(config, model, lambda: provider.module)
        for path, node in nnx.iter_graph(model):
            name, module = ".".join(map(str, path)), "/".join(map(str, path[:-1]))
            if isinstance(node, ptq.WithAux) and isinstance(flax_util.unbox(node.array), qarray.QArray):
                number = provider.rule_numbers[module]
                summed = tuple(axis for axis in range(node.ndim) if axis not in node.how.channelwise_axes)
                scale = scales.get(module)
                quant = ParamQuant(tuple(node.shape), _group_shape(node), number, node.how, summed, scale)
                param_quants[name] = _with_mse(_with_tile_axes(name, quant, config), config)
            elif isinstance(node, Skipped):
                first = f"layers.{node.like}."
                param_quants.update(
                    {f"{name}.{n.removeprefix(first)}": param_quants[n] for n in param_quants if n.startswith(first)}
                )

    try:
        jax.eval_shape(trace)
    except ValueError as e:
        if match := UNTILED.search(str(e)):
            raise _tile_error(build, config, tuple(map(int, match[1].split(","))), int(match[2]), match[3]) from None
        raise
    used = {quant.rule for quant in param_quants.values()}
    check_used(config, list(provider.seen_modules), provider.unused(), used)
    return _stacked(param_quants, config, provider, stacks) if stacks else param_quants


def _with_mse(quant: ParamQuant, config: QuantConfig) -> ParamQuant:
    """Returns the same with the calibration method of its rule that Qwix does not know."""
    if config.rules[quant.rule].weight_calibration_method != MSE:
        return quant
    return replace(quant, qwix_how=replace(quant.qwix_how, calibration_method=MSE))


def _with_tile_axes(name: str, quant: ParamQuant, config: QuantConfig) -> ParamQuant:
    """Returns the same with the tiles of its rule that Qwix does not know.

    Raises:
        ConfigError: blocks do not divide the parameter `name`.
    """
    rule = config.rules[quant.rule]
    if rule.tile_axes == "all":
        return _tiled_along_all(quant)
    if rule.tile_axes == "block":
        assert isinstance(rule.tile_size, int)
        if isinstance(found := _block_shape(quant, rule.tile_size), int):
            raise ConfigError(
                f"blocks of {rule.tile_size} of {config.name}, line {rule.line}, do not divide axis {found}, of "
                f"{quant.shape[found]}, of {name} {list(quant.shape)}",
                hint="give these modules another rule before it",
            )
        how = replace(
            quant.qwix_how,
            channelwise_axes=[axis for axis, size in enumerate(found) if size == 1],
            tiled_axes={axis: size for axis, size in enumerate(found) if 1 < size < quant.shape[axis]},
        )
        return replace(quant, group_shape=found, qwix_how=how)
    return quant


def _block_shape(quant: ParamQuant, tile: int) -> tuple[int, ...] | int:
    """Returns the number of elements along each axis in a block of `tile` inputs and as many outputs. Several axes of
    inputs, or of outputs, count as one, as in a matrix; axes before them, such as experts, have scales for each
    element. Fewer than `tile` inputs or outputs are one block. Or the axis that blocks do not divide."""
    shape, first = quant.shape, quant.summed[0]
    block = [1] * len(shape)
    outputs = [axis for axis in range(first, len(shape)) if axis not in quant.summed]
    for axes in (quant.summed, outputs):
        left = min(tile, prod(shape[axis] for axis in axes))
        for axis in reversed(axes):
            block[axis] = gcd(left, shape[axis])
            if block[axis] != min(left, shape[axis]):
                return axis
            left //= block[axis]
    return tuple(block)


def _tiled_along_all(quant: ParamQuant) -> ParamQuant:
    """Returns the same with scales of its own for each element of the summed axes but the last, which Qwix tiles."""
    first = quant.summed[:-1]
    how = replace(quant.qwix_how, channelwise_axes=sorted([*quant.qwix_how.channelwise_axes, *first]))
    group_shape = tuple(1 if axis in first else size for axis, size in enumerate(quant.group_shape))
    return replace(quant, group_shape=group_shape, qwix_how=how)


UNTILED = re.compile(r"\(([\d, ]+?),?\) cannot be tiled as {(\d+): ([\d.e-]+)")
"""The message of Qwix for an axis that a tile size does not divide: the shape of the parameter, the axis, the tile
size."""


def _tile_error(build: Callable[[], Any], config: QuantConfig, shape: Shape, axis: int, tile: str) -> ConfigError:
    """Returns the error for a tile size that does not divide an axis, with the parameters and the sizes that would."""
    state = nnx.to_flat_state(nnx.state(nnx.eval_shape(build), nnx.Param))
    wrong: dict[str, Rule] = {}
    for path, leaf in state:
        module = "/".join(map(str, path[:-1]))
        rule = next((rule for rule in config.rules if rule.matches(module)), None)
        if tuple(leaf.shape) == shape and rule is not None and rule.tile_size is not None:
            wrong[".".join(map(str, path))] = rule
    lines = sorted({rule.line for rule in wrong.values()})
    divisors = [size for size in range(8, shape[axis] + 1, 8) if shape[axis] % size == 0]
    return ConfigError(
        f"tile_size {tile} of {config.name}, line {', '.join(map(str, lines))}, does not divide axis {axis}, of "
        f"{shape[axis]}, of {', '.join(collapse(wrong))}",
        hint=(
            f"sizes that do: {', '.join(map(str, divisors[-8:]))}; change the rule, or put another before it"
            if divisors
            else "give these modules a rule without tile_size before it"
        )
        + (f": `tpuconv quantize --show {config.name}` prints it" if config.name in config_names() else ""),
    )


def _stacked(
    param_quants: Mapping[str, ParamQuant], config: QuantConfig, provider: Provider, stacks: LayerStacks
) -> dict[str, ParamQuant]:
    """Returns the result for stacked layers, from the result of one layer: each layer has its own scales.

    Raises:
        UnsupportedConfig: layers that are in one array are not quantized alike.
    """
    for path in provider.seen_modules:
        match = LAYER.fullmatch(path)
        if match and (place := stacks.find(int(match[1]))[1]) is not None:
            first = f"layers/{int(match[1]) - place * stacks.period}/{match[2]}"
            if _decisions(config, path) != _decisions(config, first):
                raise UnsupportedConfig(
                    f"{config.name} does not quantize {first} and {path} alike, so that they cannot be stacked",
                    hint="convert without `scan_layers=`, or give these layers the same rules",
                )
    out = {}
    for name, quant in param_quants.items():
        if (match := LAYER.fullmatch(name)) is None:
            out[name] = quant
            continue
        prefix, place = stacks.find(int(match[1]))
        layer_name = f"{prefix}.{match[2]}"
        if place is None:
            out[layer_name] = quant
        elif place == 0:
            out[layer_name] = replace(quant, shape=(stacks.count, *quant.shape), group_shape=(1, *quant.group_shape))
    return out


def _decisions(config: QuantConfig, module: str) -> list[Rule | None]:
    """Returns the rules that quantize a module's products: those that match it, up to the first that is for all
    products."""
    out: list[Rule | None] = []
    for rule in config.rules:
        if re.fullmatch(rule.module_path, module):
            out.append(replace(rule, line=0, module_path="") if rule.weight_qtype else None)
            if not rule.op_names:
                return out
    return [*out, None]


class Skipped(nnx.Module):
    """Replaces a layer that Qwix would treat like an earlier one, the layer `like`."""

    def __init__(self, like: int):
        self.like = like

    def __call__(self, x_BTD: jax.Array, *_: Any) -> tuple[jax.Array, None]:
        return x_BTD, None


def _skip_repeated(model: Decoder, config: QuantConfig) -> None:
    """Keeps only the first of equal layers, since tracing each takes time. Layers are equal if they have the same
    modules, sizes, settings and window, and the same rules match each module."""
    kinds: list[tuple[Any, int]] = []
    needed = {source for i, source in enumerate(getattr(model.config, "kv_sources", ())) if source != i}
    needed |= model.config.weight_sharing_layers
    for i, (layer, window) in enumerate(zip(model.layers, model.config.windows, strict=True)):
        graph, state = nnx.split(layer)
        sizes = [(path, x.shape, x.dtype) for path, x in nnx.to_flat_state(state)]
        modules = ["/".join(map(str, ("layers", i, *path))) for path, _ in nnx.iter_modules(layer)]
        matches = [[bool(re.fullmatch(rule.module_path, m)) for rule in config.rules] for m in modules]
        kind = graph, sizes, window, matches  # not hashable: settings may be dicts
        if (like := next((first for known, first in kinds if known == kind), None)) is None:
            kinds.append((kind, i))
        elif i not in needed:  # later layers use its keys and values, or its weights
            model.layers[i] = Skipped(like)


def _group_shape(leaf: Any) -> tuple[int, ...]:
    return tuple(n // s for n, s in zip(leaf.shape, flax_util.unbox(leaf.array).scale.shape, strict=True))


def _modules(model: Any) -> list[str]:
    """Returns the names of all modules of a model, as rules name them."""
    return ["/".join(map(str, path)) for path, _ in nnx.iter_modules(model)]
