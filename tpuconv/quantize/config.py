"""Quantization configs: YAML files with Qwix rules, in the schema that TPU serving uses.

    summary: int8 weights
    qwix:
      rules:
        - {module_path: 'layers/.*', weight_qtype: int8}
    gates: {top1: 0.99}
    calibration: {method: gptq}

Without `gates` the model may lose what roundings of this size change (`tpuconv.quantize.rerounding`); `gates: none` is
a config without any. With `calibration` the model is run on text, layer by layer, to round its weights with less error
than to the nearest: see `Calibration`.

They are read strictly: see `tpuconv.quantize.strict_yaml`.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

from tpuconv.errors import ConfigError, CorruptOutput, UsageError
from tpuconv.jsonfile import read_bytes
from tpuconv.location import BucketPath, to_location
from tpuconv.models.common.beside import AUDIO, VIDEO, VISION
from tpuconv.names import AUTO_NAME, MANIFEST
from tpuconv.notation.table import MTP_PARAMETERS
from tpuconv.quantize.calibration_settings import Calibration, parse_calibration
from tpuconv.quantize.strict_yaml import MAX_CONFIG_BYTES, YamlValue, compose, node_text, yaml_node

INTEGER_QTYPES = ("int2", "int3", "int4", "int5", "int6", "int7", "int8")
QTYPES: Mapping[str, float] = {
    **{name: float(name.removeprefix("int")) for name in INTEGER_QTYPES},
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "mxfp8"), 8.0),
    **dict.fromkeys(("float4_e2m1fn", "mxfp4", "nvfp4", "nf4"), 4.0),
}
"""Bits of one quantized value, without scales."""

REQUIRED_TILE_SIZES = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}
"""The tile size that a type requires."""

SCALE_DTYPES = ("bfloat16", "float32")
METHODS: Mapping[str, tuple[int, ...]] = {"absmax": (0, 1), "minmax": (0, 1), "rms": (1,), "fixed": (1, 2)}
"""The possible counts of numbers after a calibration method of Qwix."""
MSE = "mse"
"""The calibration method of weights that searches the scales with the least squared error; see
`tpuconv.quantize.clipping`."""
LARGEST_FACTOR = 1e6
"""The largest of them. The smallest factor is its inverse."""
GATE_LIMITS: Mapping[str, float] = {"top1": 1.0, "mean_kl": 1e6}
"""The gates that a config may have, and their largest values. The smallest is 0."""

ALL_TOKENS = (0, 1)
"""The `act_batch_axes` of a static scale: a scale is the mean over texts and positions."""

TILE_AXES = ("last", "all", "block")

MTP_MODULE = MTP_PARAMETERS.removesuffix(".")
NAMED_ALONE = (VISION, VIDEO, AUDIO, MTP_MODULE)
"""The parts beside the text model, and the module for multi-token prediction. A rule for all modules leaves them
alone."""

EMBEDDING = "embed"
"""The module whose matrix is looked up, and in some models multiplied too. Qwix would quantize it for the product, and
the look-up could not read it. Its parts, such as projections of n-grams, stay as they are too."""

AUTO = "auto:"
"""The beginning of a config that names a number of bits."""
MOST_BITS = 16

NO_MODULE = "(?!)"
"""A pattern that nothing matches."""


@dataclass(frozen=True)
class Rule:
    """One rule. The first that matches wins. For the fields see `qwix.QuantizationRule`; `line` is its line in the
    file. `tile_axes` is ours: "last" tiles the last of the axes that a product sums over, as Qwix does; "all" gives
    each element of the others scales of its own, so that a scale is for `tile_size` weights there too; "block" tiles
    inputs and outputs, so that a scale is for `tile_size` x `tile_size` weights of a matrix.
    With `act_static_scale` activations have one scale for each product, which calibration finds."""

    line: int
    module_path: str = ".*"
    op_names: tuple[str, ...] = ()
    weight_qtype: str | None = None
    act_qtype: str | None = None
    tile_size: int | float | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    tile_axes: str = "last"
    act_static_scale: bool = False
    act_batch_axes: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that differ from Qwix's defaults."""
        fields = {name: getattr(self, name) for name in RULE_FIELDS}
        return {name: value for name, value in fields.items() if value != getattr(Rule, name)}

    def to_qwix(self) -> dict[str, Any]:
        """Returns the fields that Qwix has. It has no blocks: of a rule with these it sees no tiles. Scales of `mse`
        have the shape that its default gives."""
        ours = {"tile_axes", *(["tile_size"] if self.tile_axes == "block" else ())}
        ours |= {"weight_calibration_method"} if self.weight_calibration_method == MSE else set()
        return {name: value for name, value in self.to_json().items() if name not in ours}

    def names_part(self, part: str) -> bool:
        """Returns True if the pattern begins with the name of a part, such as `vision/.*`."""
        return self.module_path.startswith(part)

    def matches(self, module: str) -> bool:
        """Returns True if the rule is for a module. A module of a part needs a rule that names the part."""
        part = module.partition("/")[0]
        return (part not in NAMED_ALONE or self.names_part(part)) and bool(re.fullmatch(self.module_path, module))

    @property
    def group_size(self) -> int:
        """The number of weights that share a scale; 0 if it depends on the parameter."""
        if not isinstance(self.tile_size, int):
            return 0
        return self.tile_size**2 if self.tile_axes == "block" else self.tile_size


RULE_FIELDS = tuple(name for name in Rule.__dataclass_fields__ if name != "line")


@dataclass(frozen=True)
class QuantConfig:
    """The rules of one file.

    Attributes:
        scale_dtype: the dtype of stored scales; None for the dtype of the weights.
        gates: the limits that the quantized model must hold, compared with the original; None for what roundings of
            this size change, empty where the user wants none.
        calibration: None to round each weight to the nearest value.
        target_bits: the mean bits of a quantized weight, by which the rules are chosen for a model; None where `rules`
            are the rules.
    """

    name: str
    summary: str
    rules: tuple[Rule, ...]
    scale_dtype: str | None = None
    gates: Mapping[str, float] | None = None
    calibration: Calibration | None = None
    target_bits: float | None = None

    @property
    def bits(self) -> list[float]:
        """The bits per weight of each rule that quantizes weights, with its share of scales in bfloat16."""
        rules = [rule for rule in self.rules if rule.weight_qtype]
        return [QTYPES[str(r.weight_qtype)] + (16 / r.group_size if r.group_size else 0) for r in rules]

    def rule_of(self, module: str) -> int:
        """Returns the number of the first rule that matches a module."""
        return next(i for i, rule in enumerate(self.rules) if rule.matches(module))

    def names_part(self, part: str) -> bool:
        """Returns True if a rule names a part."""
        return any(rule.names_part(part) for rule in self.rules)

    def for_part(self, part: str) -> "QuantConfig":
        """Returns the config with as many rules, of which the ones that do not name the part match no module."""
        kept = (rule if rule.names_part(part) else replace(rule, module_path=NO_MODULE) for rule in self.rules)
        return replace(self, rules=tuple(kept))

    def to_json(self) -> dict[str, Any]:
        """Returns the manifest's description of the config. `from_json` is the inverse."""
        return {
            "name": self.name,
            "summary": self.summary,
            "rules": [rule.to_json() for rule in self.rules],
            "scale_dtype": self.scale_dtype,
            "gates": None if self.gates is None else dict(self.gates),
            **({"calibration": self.calibration.to_json()} if self.calibration else {}),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "QuantConfig":
        """Returns the config of a manifest. The line of a rule is its number.

        Raises:
            CorruptOutput: it is no valid config.
        """
        qwix = {"scale_dtype": facts.get("scale_dtype"), "rules": facts["rules"]}
        root = {"summary": facts["summary"], "qwix": qwix}
        root |= {"gates": gates} if (gates := facts.get("gates", {})) is not None else {}
        if "calibration" in facts:  # manifests of GPTQ without `refine` are of releases that had no descent
            before = {"refine": 0} if facts["calibration"].get("method") == "gptq" else {}
            root |= {"calibration": before | facts["calibration"]}
        try:
            return _parse_root(YamlValue(yaml_node(root), MANIFEST, "quantization"), facts["name"])
        except ConfigError as e:
            raise CorruptOutput(f"the quantization of the checkpoint is not valid: {e.message}", hint=e.hint) from None


def config_names() -> list[str]:
    """Returns the names of the configs of this package."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in configs_folder().iterdir() if entry.name.endswith(".yaml")
    )


def find_config(name_or_path: str) -> QuantConfig:
    """Returns a config of this package by its name, with or without `.yaml`, or any file by its path. `auto:4.5` is a
    config whose rules are chosen for a model (`tpuconv.quantize.recipe.roles`).

    Raises:
        UsageError: there is no such config or file, or no such number of bits.
        ConfigError: the file is no valid config.
    """
    if f"{name_or_path}:".startswith(AUTO):
        return _auto_config(name_or_path)
    path, name = to_location(name_or_path), Path(name_or_path).name.removesuffix(".yaml")
    if isinstance(path, BucketPath) or (os.path.lexists(path) and not os.path.isdir(path)):
        data = read_bytes(path, MAX_CONFIG_BYTES, ConfigError)
    elif name in config_names() and path.parent == Path():
        data = (configs_folder() / f"{name}.yaml").read_bytes()
    else:
        near = [c for c in config_names() if name and c.startswith(name)] or get_close_matches(name, config_names(), 1)
        raise UsageError(
            f"there is no quantization config '{name_or_path}'",
            hint=(f"did you mean {' or '.join(near)}? " if near else "")
            + "`tpuconv quantize --list` shows all; or give a file",
        )
    return parse_config(data, name, str(path))


def _auto_config(text: str) -> QuantConfig:
    bits = text.removeprefix(AUTO)
    if not re.fullmatch(r"\d{1,2}(\.\d{1,4})?", bits) or not 0 < float(bits) <= MOST_BITS:
        raise UsageError(
            f"'{text}' names no number of bits", hint=f"write auto:4.5: bits per quantized weight, up to {MOST_BITS}"
        )
    return QuantConfig(
        f"{AUTO_NAME}{float(bits):g}", f"{float(bits):g} bits per quantized weight", (), target_bits=float(bits)
    )


def configs_folder() -> Any:
    """Returns the folder of the configs of this package."""
    return files("tpuconv") / "quant_configs"


def parse_config(data: bytes, name: str, path: str) -> QuantConfig:
    """Parses the bytes of a YAML file. `name` is the config's name, `path` the file that errors name.

    Raises:
        ConfigError: something in it is not valid, with line and column.
    """
    return _parse_root(YamlValue(compose(data, path), path, "the file"), name)


def _parse_root(root: YamlValue, name: str) -> QuantConfig:
    top = root.mapping("qwix", "summary", "gates", "calibration")
    if "qwix" not in top:
        raise root.error("has no 'qwix'", hint="a config is {qwix: {rules: [...]}}")
    qwix = top["qwix"].mapping("use_abstract_model", "scale_dtype", "rules")
    if "use_abstract_model" in qwix:  # how the server loads; here the model is always abstract
        qwix["use_abstract_model"].boolean()
    if "rules" not in qwix:
        raise top["qwix"].error("has no 'rules'")
    rules = tuple(_rule(value) for value in qwix["rules"].sequence())
    if not any(rule.weight_qtype for rule in rules):
        raise qwix["rules"].error("quantizes no weights", hint="give a rule with a weight_qtype")
    if "calibration" not in top and (static := next((rule for rule in rules if rule.act_static_scale), None)):
        raise qwix["rules"].error(
            f"has act_static_scale in line {static.line}, and no calibration finds the scales",
            hint="add `calibration: {method: nearest}`, or another method, beside `qwix`",
        )
    return QuantConfig(
        name=name,
        summary=top["summary"].text() if "summary" in top else name,
        rules=rules,
        scale_dtype=qwix["scale_dtype"].choice(SCALE_DTYPES, null=True) if "scale_dtype" in qwix else None,
        gates=_gates(top["gates"]) if "gates" in top else None,
        calibration=parse_calibration(top["calibration"], rules) if "calibration" in top else None,
    )


def _gates(value: YamlValue) -> dict[str, float]:
    if value.is_scalar("none"):
        return {}
    return {name: gate.number(GATE_LIMITS[name], least=0) for name, gate in value.mapping(*GATE_LIMITS).items()}


def gate_from_text(text: str) -> tuple[str, float]:
    """Returns a gate written as "top1=0.99": the name of the statistic and its bound.

    Raises:
        UsageError: it is none of `GATE_LIMITS`, or outside of its range.
    """
    name, _, number = text.partition("=")
    try:
        bound = float(number)
    except ValueError:
        bound = -1.0
    if not _is_gate(name, bound):
        raise UsageError(f"'{text}' is not a gate", hint=f"write top1=0.99; {_known_gates()}")
    return name, bound


def check_gates(gates: Mapping[str, float]) -> None:
    """Raises UsageError if a name is none of `GATE_LIMITS`, or its bound is outside of its range."""
    for name, bound in gates.items():
        if not _is_gate(name, bound):
            raise UsageError(f"{name}={bound} is not a gate", hint=f'give {{"top1": 0.99}}; {_known_gates()}')


def _is_gate(name: str, bound: float) -> bool:
    return name in GATE_LIMITS and 0 <= bound <= GATE_LIMITS[name]


def _known_gates() -> str:
    return f"known are {', '.join(f'{name} from 0 to {most:,.0f}' for name, most in GATE_LIMITS.items())}"


NEEDED = {
    "act_qtype": "weight_qtype",
    "tile_size": "weight_qtype",
    "weight_calibration_method": "weight_qtype",
    "act_calibration_method": "act_qtype",
}
"""Fields of a rule that Qwix reads only beside others."""


def _rule(value: YamlValue) -> Rule:
    fields = value.mapping(*RULE_FIELDS)
    given: dict[str, Any] = {}
    if "module_path" in fields:
        given["module_path"] = fields["module_path"].text()
    if "op_names" in fields:
        given["op_names"] = tuple(item.text() for item in fields["op_names"].sequence())
    for name in ("weight_qtype", "act_qtype"):
        if name in fields:
            given[name] = fields[name].choice(tuple(QTYPES), null=True)
    for name in ("weight_calibration_method", "act_calibration_method"):
        if name in fields and not fields[name].is_null():
            is_mse = name.startswith("weight") and fields[name].is_scalar(MSE)
            given[name] = MSE if is_mse else _method(fields[name])
    if "tile_size" in fields and not fields["tile_size"].is_null():
        tile = given["tile_size"] = fields["tile_size"].number(1 << 31)
        if tile <= 0 or (isinstance(tile, float) and tile > 1):
            raise fields["tile_size"].error("tile_size is a number of elements, or a fraction of the axis")
    if "tile_axes" in fields:
        given["tile_axes"] = _tile_axes(fields["tile_axes"], given)
    given |= _static_scale(value, fields, given)
    rule = Rule(value.line, **given)
    for name, needed in NEEDED.items():
        if given.get(name) is not None and not given.get(needed):
            raise fields[name].error(f"{name} does nothing without {needed}", hint=f"add {needed}, or leave it out")
    _check_types(value, rule)
    return rule


def _check_types(value: YamlValue, rule: Rule) -> None:
    """Raises ConfigError if the types of a rule do not go with its tiles and calibration methods."""
    methods = (rule.weight_calibration_method, rule.act_calibration_method or "absmax")
    if rule.act_qtype and all(map(_is_asymmetric, methods)):
        raise value.error("only weights or activations can have zero points", hint="use absmax for one of them")
    for qtype, method in zip((rule.weight_qtype, rule.act_qtype), methods, strict=True):
        if qtype in REQUIRED_TILE_SIZES and rule.tile_size != REQUIRED_TILE_SIZES[qtype]:
            raise value.error(f"{qtype} needs tile_size: {REQUIRED_TILE_SIZES[qtype]}")
        if method == MSE and qtype in REQUIRED_TILE_SIZES:
            raise value.error(f"the scales of {qtype} are not free: mse works with other types")
        if _is_asymmetric(method) and qtype not in (None, "int8", "int4"):
            raise value.error(f"{method} works with int8 and int4, not with {qtype}")


def _tile_axes(value: YamlValue, given: Mapping[str, Any]) -> str:
    """Returns the value of `tile_axes` in a rule with these other fields."""
    axes = str(value.choice(TILE_AXES, null=False))
    if axes != "last" and not isinstance(given.get("tile_size"), int):
        raise value.error("needs a tile_size, a number of elements")
    if axes != "last" and given.get("act_qtype"):
        raise value.error("works with weights only: Qwix tiles activations along the last axis")
    if axes == "block" and given.get("weight_qtype") in REQUIRED_TILE_SIZES:
        raise value.error(f"{given['weight_qtype']} has groups of inputs alone")
    return axes


def _static_scale(value: YamlValue, fields: Mapping[str, YamlValue], given: Mapping[str, Any]) -> dict[str, Any]:
    """`act_static_scale` and `act_batch_axes` of a rule with these fields, of which others are `given`."""
    static, axes = fields.get("act_static_scale"), fields.get("act_batch_axes")
    if static is None or static.is_null() or not static.boolean():
        if axes is not None and not axes.is_null():
            raise axes.error("is for static scales", hint="leave it out, or add `act_static_scale: true`")
        return {}
    for name in ("weight_qtype", "act_qtype"):
        if not given.get(name):
            raise static.error(f"needs a rule with {name}")
    if axes is None or tuple(axis.number(9, least=0) for axis in axes.sequence()) != ALL_TOKENS:
        raise (axes or static).error(
            "a static scale is for all texts and positions", hint=f"add `act_batch_axes: {list(ALL_TOKENS)}`"
        )
    if "tile_size" in given:
        raise fields["tile_size"].error(
            "works with scales of each token: a static scale belongs to complete inputs",
            hint="leave out tile_size, or act_static_scale",
        )
    if _is_asymmetric(given.get("act_calibration_method", "absmax")):
        raise fields["act_calibration_method"].error(
            "a static scale has no zero point", hint="use absmax, rms or a range around 0"
        )
    return {"act_static_scale": True, "act_batch_axes": ALL_TOKENS}


def _is_asymmetric(method: str) -> bool:
    name, *numbers = method.split(",")
    return name == "minmax" or (len(numbers) == 2 and sum(map(float, numbers)) != 0)


def _method(value: YamlValue) -> str:
    """Returns a calibration method with its numbers: absmax, minmax, rms or fixed."""
    name, *numbers = value.text().split(",")
    try:
        factors = [float(number) for number in numbers]
    except ValueError:
        factors = []
    if name not in METHODS or len(numbers) != len(factors) or len(factors) not in METHODS[name]:
        raise value.error(
            f"unknown calibration method {node_text(value.node)}",
            hint="known are absmax, absmax,<factor>, minmax, minmax,<factor>, rms,<factor> and fixed,<min>,<max>; of "
            "weights mse too",
        )
    if name == "fixed":
        low, high = factors if len(factors) == 2 else (-factors[0], factors[0])
        if not -LARGEST_FACTOR <= low <= 0 <= high <= LARGEST_FACTOR or low == high:
            raise value.error(
                f"{node_text(value.node)}: the range must go from 0 or less to 0 or more, and not be empty"
            )
    elif not all(1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR for factor in factors):
        raise value.error(
            f"{node_text(value.node)}: the factor must be from {1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}"
        )
    return value.text()
