"""Which parameters a config quantizes, and how: resolved by Qwix itself on the model with shapes instead of arrays."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx

from tpuconv.checkpoint.manifest import KEPT
from tpuconv.errors import ConfigError, CorruptOutput, UnsupportedConfig
from tpuconv.mapping.passthrough import Stored
from tpuconv.models.common.decoder import Decoder
from tpuconv.models.kernels import grouped
from tpuconv.names import QVALUE, SCALE
from tpuconv.private import flax_util, ptq, qarray
from tpuconv.private import qwix_einsum as einsum
from tpuconv.private import qwix_ragged_dot as ragged_dot
from tpuconv.quantize import tiled
from tpuconv.quantize.config import QuantConfig, Rule, check_rules

TOKENS = 1024
"""Of the call that shows Qwix every product; enough that no product takes a short cut for few tokens."""

EMBEDDING = "embed"
"""The module whose matrix is looked up, and in some models multiplied too: Qwix would quantize it for the product, and
the look-up could not read it."""

LAYER = re.compile(r"layers[./](\d+)[./](.*)")
"""The name of a parameter or module of one layer: its number, and the name within."""


class Provider(qwix.PtqProvider):  # type: ignore[misc]
    """Qwix's provider for quantized weights, which sees the grouped products of experts too, and remembers which
    modules asked for a rule."""

    def __init__(self, config: QuantConfig):
        rules = [qwix.QuantizationRule(**rule.to_json()) for rule in config.rules]
        super().__init__([qwix.QuantizationRule(module_path=EMBEDDING), *rules], _einsum_fn=_einsum)
        self.asked: dict[str, None] = {}

    def unused(self) -> set[int]:
        """The numbers of the config's rules that decided about nothing."""
        return {i for i, count in enumerate(self._rule_matches[1:]) if count == 0}

    def _get_current_rule_and_op_id(self, op_name: str, **kwargs: Any) -> Any:
        self.asked["/".join(map(str, flax_util.get_current_module_path()))] = None
        return super()._get_current_rule_and_op_id(op_name, **kwargs)

    def get_intercept_map(self) -> dict[str, Callable[..., Any]]:
        intercepted: dict[str, Callable[..., Any]] = super().get_intercept_map()
        return intercepted | {"tpuconv.models.kernels.grouped.product": self.grouped_product}

    def grouped_product(self, lhs: Any, rhs: Any, group_sizes: jax.Array, *, groups: int) -> Any:
        """Rows of `lhs` [T, D], group by group, times `rhs` [E, D, M]: scales as for the einsum TD,EDM->TEM."""
        rule, op_id = self._get_current_rule_and_op_id("ragged_dot")
        if rule is None or rule.weight_qtype is None:
            return grouped.product(lhs, rhs, group_sizes, groups=groups)
        if isinstance(rhs, ptq.WithAux):
            rhs = rhs.array
        elif name := flax_util.find_param(rhs):
            how = qarray.HowToQuantize(
                qtype=rule.weight_qtype,
                channelwise_axes=[0, 2],
                tiled_axes={1: rule.tile_size} if rule.tile_size else {},
                calibration_method=rule.weight_calibration_method,
            )
            rhs = ptq.create_quantized_param(name, rhs, how).array
        if _is_codes(rhs) and rule.act_qtype is None:
            return grouped.product(lhs, rhs.qvalue, group_sizes, groups=groups, scale=rhs.scale)
        if rule.act_qtype is not None:
            how = qarray.HowToQuantize(
                qtype=rule.act_qtype,
                channelwise_axes=[0],
                tiled_axes={1: rule.tile_size} if rule.tile_size else {},
                calibration_method=rule.act_calibration_method,
            )
            lhs = ptq.quantize_act(lhs, how, rule, f"{op_id}_lhs")
        return ragged_dot(lhs, rhs, group_sizes)


def _is_codes(x: Any) -> bool:
    """Whether these are codes that are values themselves, and scales."""
    return isinstance(x, qarray.QArray) and x.zero_point is None and x.qvalue.dtype.name in grouped.KINDS


def _einsum(equation: str, lhs: Any, rhs: Any) -> jax.Array:
    """Qwix's; on a TPU that of `tiled` where that pays."""
    if isinstance(lhs, qarray.QArray) or not _is_codes(rhs) or not tiled.is_for(equation, lhs, rhs.qvalue, rhs.scale):
        y: jax.Array = einsum(equation, lhs, rhs)
        return y

    def by_qwix(x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
        y: jax.Array = einsum(equation, x, rhs.replace(qvalue=codes, scale=scale))
        return y.astype(x.dtype)

    operands, on_tpu = (lhs, rhs.qvalue, rhs.scale), partial(tiled.einsum, equation)
    return jax.lax.platform_dependent(*operands, tpu=on_tpu, default=by_qwix)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class How:
    """How one parameter is quantized: `tiles` is how many elements of each axis share a scale; `rule` the number of
    the rule; `how` in Qwix's words, of one layer where layers are stacked."""

    shape: tuple[int, ...]
    tiles: tuple[int, ...]
    rule: int
    how: Any

    @property
    def qtype(self) -> str:
        return str(self.how.qtype)


def kept_rules(kept: Mapping[str, Mapping[str, Any]], *, stacked: bool = False) -> QuantConfig:
    """A config that quantizes the modules of these parameters and no others, each in the type that it is kept in; their
    scales are those of the checkpoint, not what Qwix would make."""
    modules: dict[str, list[str]] = {}
    for name, facts in kept.items():
        path = re.escape("/".join(name.split(".")[:-1]))
        if stacked:
            path = re.sub("^layers/", r"layers/\\d+/", path)
        modules.setdefault(facts["qtype"], []).append(path)
    rules = [Rule(0, module_path="|".join(paths), weight_qtype=qtype) for qtype, paths in modules.items()]
    return QuantConfig(KEPT, "", tuple(rules))


def quantized(model: nnx.Module, provider: Provider) -> Any:
    """The model as Qwix quantizes it. Called within `nnx.eval_shape` it needs no weights."""
    return qwix.quantize_model(model, provider, jnp.zeros((1, TOKENS), jnp.int32))


def abstract(build: Callable[[], Any], quantization: Mapping[str, Any], *, stacked: bool = False) -> Any:
    """The model with shapes instead of arrays, quantized as a manifest says: by rules, or kept as it was released.
    `build` makes it with separate layers, which rules name; where a checkpoint has them `stacked`, they are then.

    Raises:
        ConfigError: the pattern of a rule is none, or takes for ever.
    """
    kept = {name: facts for name, facts in quantization.get("parameters", {}).items() if "kept" in facts}
    config = QuantConfig.from_json(quantization) if "rules" in quantization else kept_rules(kept, stacked=stacked)

    def traced() -> Any:
        model = build()
        if "rules" in quantization:  # others are names, escaped
            check_rules(config, _modules(model))
        model = quantized(model, Provider(config))
        if stacked:
            model.stack_layers()
        return model

    graphdef, state = nnx.split(nnx.eval_shape(traced))
    flat = {".".join(map(str, path)): (path, value) for path, value in nnx.to_flat_state(state)}
    for name, facts in kept.items():  # scales of their own, whatever Qwix would make
        known = {name + SCALE, name + QVALUE} <= flat.keys() and facts["stored"]
        if not known or len(facts["tiles"]) != flat[name + QVALUE][1].ndim:
            raise CorruptOutput(f"the manifest has {name} as released, and the model has no such parameter")
        path, scale = flat[name + SCALE]
        codes = flat[name + QVALUE][1].shape
        shape = tuple(n // tile for n, tile in zip(codes, facts["tiles"], strict=True))
        dtype = jnp.promote_types(Stored.from_json(facts["stored"][0]).scale_dtype, scale.dtype)
        flat[name + SCALE] = path, scale.replace(jax.ShapeDtypeStruct(shape, dtype))  # type: ignore[no-untyped-call]
    return nnx.merge(graphdef, nnx.from_flat_state(list(flat.values())))


def resolve(build: Callable[[], Any], config: QuantConfig, *, stacked: bool = False) -> dict[str, How]:
    """For every parameter that is quantized how, by name; where layers are `stacked`, of all layers by the name of
    their one array. `build` makes the model with separate layers.

    Raises:
        ConfigError: a rule decides about nothing, is matched for ever, or has a tile that does not divide an axis.
        UnsupportedConfig: layers that are to be stacked are not quantized alike.
    """
    provider = Provider(config)
    hows: dict[str, How] = {}

    def trace() -> None:
        model = build()
        check_rules(config, _modules(model))
        if isinstance(model, Decoder):  # which says how layers are called
            _skip_repeated(model, config)
        for path, node in nnx.iter_graph(quantized(model, provider)):
            name, module = ".".join(map(str, path)), "/".join(map(str, path[:-1]))
            if isinstance(node, ptq.WithAux):
                hows[name] = How(tuple(node.shape), _tiles(node), _first_match(config, module), node.how)
            elif isinstance(node, Skipped):
                first = f"layers.{node.like}."
                hows.update({f"{name}.{n.removeprefix(first)}": hows[n] for n in hows if n.startswith(first)})

    try:
        jax.eval_shape(trace)
    except ValueError as e:
        if "cannot be tiled" in str(e):
            raise ConfigError(
                f"a tile_size of {config.name} does not divide an axis of this model: {e}",
                hint="give those modules a rule with another tile_size before it",
            ) from None
        raise
    _check_used(config, provider)
    return _stacked(hows, config, provider) if stacked else hows


def _stacked(hows: Mapping[str, How], config: QuantConfig, provider: Provider) -> dict[str, How]:
    """Of all layers what one says: each has scales of its own.

    Raises:
        UnsupportedConfig: the layers are not quantized alike.
    """
    for path in provider.asked:
        if match := LAYER.fullmatch(path):
            first = f"layers/0/{match[2]}"
            if _decisions(config, path) != _decisions(config, first):
                raise UnsupportedConfig(
                    f"{config.name} does not quantize {first} and {path} alike, so that they cannot be stacked",
                    hint="convert without --scan-layers, or give all layers the same rules",
                )
    matches = {name: LAYER.fullmatch(name) for name in hows}
    layers = len({match[1] for match in matches.values() if match})
    out = {}
    for name, how in hows.items():
        match = matches[name]
        if match is None:
            out[name] = how
        elif match[1] == "0":
            out[f"layers.{match[2]}"] = replace(how, shape=(layers, *how.shape), tiles=(1, *how.tiles))
    return out


def _decisions(config: QuantConfig, module: str) -> list[Rule | None]:
    """What a module's products are quantized by: the rules that match it, up to the one that is for all products."""
    out: list[Rule | None] = []
    for rule in config.rules:
        if re.fullmatch(rule.module_path, module):
            out.append(replace(rule, line=0, module_path="") if rule.weight_qtype else None)
            if not rule.op_names:
                return out
    return [*out, None]


class Skipped(nnx.Module):
    """In the place of a layer that Qwix would treat as it does an earlier one, the layer `like`."""

    def __init__(self, like: int):
        self.like = like

    def __call__(self, x_BTD: jax.Array, *_: Any) -> tuple[jax.Array, None]:
        return x_BTD, None


def _skip_repeated(model: Decoder, config: QuantConfig) -> None:
    """Keeps of the layers that are alike the first one: tracing each takes time. Alike are layers of the same modules,
    sizes, settings and window, each of whose modules is matched by the same rules."""
    kinds: list[tuple[Any, int]] = []
    for i, (layer, window) in enumerate(zip(model.layers, model.config.windows, strict=True)):
        graph, state = nnx.split(layer)
        sizes = [(path, x.shape, x.dtype) for path, x in nnx.to_flat_state(state)]
        modules = ["/".join(map(str, ("layers", i, *path))) for path, _ in nnx.iter_modules(layer)]
        matches = [[bool(re.fullmatch(rule.module_path, m)) for rule in config.rules] for m in modules]
        kind = graph, sizes, window, matches  # not hashable: settings may be dicts
        if (like := next((first for known, first in kinds if known == kind), None)) is None:
            kinds.append((kind, i))
        else:
            model.layers[i] = Skipped(like)


def _tiles(leaf: Any) -> tuple[int, ...]:
    return tuple(n // s for n, s in zip(leaf.shape, flax_util.unbox(leaf.array).scale.shape, strict=True))


def _first_match(config: QuantConfig, module: str) -> int:
    return next(i for i, rule in enumerate(config.rules) if re.fullmatch(rule.module_path, module))


def _modules(model: Any) -> list[str]:
    """The names of all modules of a model, as rules name them."""
    return ["/".join(map(str, path)) for path, _ in nnx.iter_modules(model)]


def _check_used(config: QuantConfig, provider: Provider) -> None:
    """That every rule decides about something."""
    faults = []
    for i in sorted(provider.unused()):
        rule = config.rules[i]
        own = [path for path in provider.asked if re.fullmatch(rule.module_path, path)]
        if own:
            before = config.rules[_first_match(config, own[0])].line
            faults.append(f"line {rule.line}: {rule.module_path!r}: line {before} matches first what it matches")
        else:
            faults.append(f"line {rule.line}: {rule.module_path!r} matches no module with a product")
    if faults:
        raise ConfigError(
            f"{len(faults)} {'rules' if len(faults) > 1 else 'rule'} of {config.name} would decide about nothing",
            details=faults,
            hint="modules are called like " + ", ".join(_examples(provider.asked)),
        )


def _examples(asked: Mapping[str, None]) -> list[str]:
    """One module of each kind, numbers aside."""
    kinds: dict[str, str] = {}
    for path in asked:
        kinds.setdefault(re.sub(r"\d+", "0", path), path)
    return list(kinds.values())[:12]
