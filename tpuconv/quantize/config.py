"""Quantization configs: YAML files with Qwix rules, in the schema that TPU serving uses.

    summary: int8 weights
    qwix:
      rules:
        - {module_path: 'layers/.*', weight_qtype: int8}
    gates: {top1: 0.99}

Without `gates` a config has those of `default_gates`; `gates: none` is one without any.

They are read strictly. What YAML allows and surprises (duplicate keys, `None`, which is a string, `no`, which is False,
aliases that expand to gigabytes) is an error with line and column.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from tpuconv.errors import ConfigError, CorruptOutput, UsageError
from tpuconv.jsonfile import read_bytes, short
from tpuconv.mapping.table import HasAxes, MappingTable
from tpuconv.names import MANIFEST
from tpuconv.patterns import check_patterns

MAX_CONFIG_BYTES, MAX_DEPTH = 1 << 20, 20

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
"""How many numbers may follow a calibration method."""
LARGEST_FACTOR = 1e6
"""The largest of them. The smallest factor is its inverse."""
GATE_LIMITS: Mapping[str, float] = {"top1": 1.0, "mean_kl": 1e6}
"""The gates that a config may have, and their largest values. The smallest is 0."""

LOSS_CLASSES: tuple[Mapping[str, float], ...] = (
    {"top1": 0.98, "mean_kl": 0.003},
    {"top1": 0.96, "mean_kl": 0.01},
    {"top1": 0.90, "mean_kl": 0.08},
)
"""The default gates, by how much a rule may lose: int8 weights; float8 weights or 8-bit activations; fewer than 8 bits.

They were measured on examples/tiny-qwen3 (24 lines of examples/sample.txt, bfloat16), every layer and the head
quantized: top-1 and KL of 0.999 and 0.0003 with int8 weights, 0.993 and 0.0015 with FP8 weights and activations, 0.974
and 0.010 with int4 weights, one scale for each channel. A gate allows about 7 times as much KL divergence, since other
models lose more, and is still far from what is broken: int2 in tiles of 32 gives 0.75 and 0.32."""


@dataclass(frozen=True)
class Rule:
    """One rule. The first that matches wins. For the fields see `qwix.QuantizationRule`; `line` is its line in the
    file."""

    line: int
    module_path: str = ".*"
    op_names: tuple[str, ...] = ()
    weight_qtype: str | None = None
    act_qtype: str | None = None
    tile_size: int | float | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from Qwix's defaults."""
        fields = {name: getattr(self, name) for name in RULE_FIELDS}
        return {name: value for name, value in fields.items() if value != getattr(Rule, name)}


RULE_FIELDS = tuple(name for name in Rule.__dataclass_fields__ if name != "line")


@dataclass(frozen=True)
class QuantConfig:
    """The rules of one file.

    Attributes:
        scale_dtype: the dtype of stored scales; None for that of the weights.
        gates: the limits that the quantized model must hold, compared with the original; empty where the user wants
            none.
    """

    name: str
    summary: str
    rules: tuple[Rule, ...]
    scale_dtype: str | None = None
    gates: Mapping[str, float] = field(default_factory=dict)

    @property
    def bits(self) -> list[float]:
        """The bits per weight of each rule that quantizes weights, with its share of scales in bfloat16."""
        rules = [rule for rule in self.rules if rule.weight_qtype]
        return [QTYPES[str(r.weight_qtype)] + (16 / r.tile_size if isinstance(r.tile_size, int) else 0) for r in rules]

    def to_json(self) -> dict[str, Any]:
        """What the manifest says about it. `from_json` is the inverse."""
        return {
            "name": self.name,
            "summary": self.summary,
            "rules": [rule.to_json() for rule in self.rules],
            "scale_dtype": self.scale_dtype,
            "gates": dict(self.gates),
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> "QuantConfig":
        """The config of a manifest. The line of a rule is its number.

        Raises:
            CorruptOutput: it is no valid config.
        """
        qwix = {"scale_dtype": facts.get("scale_dtype"), "rules": facts["rules"]}
        root = {"summary": facts["summary"], "qwix": qwix, "gates": facts.get("gates", {})}
        try:
            return _parse_root(_Value(_node(root), MANIFEST, "quantization"), facts["name"])
        except ConfigError as e:
            raise CorruptOutput(e.message, hint=e.hint) from None


def config_names() -> list[str]:
    """The names of the configs of this package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _folder().iterdir() if entry.name.endswith(".yaml"))


def find_config(name_or_path: str) -> QuantConfig:
    """A config of this package by its name, with or without `.yaml`, or any file by its path.

    Raises:
        UsageError: there is no such config or file.
        ConfigError: the file is no valid config.
    """
    path, name = Path(name_or_path), Path(name_or_path).name.removesuffix(".yaml")
    if os.path.lexists(path) and not os.path.isdir(path):
        data = read_bytes(path, MAX_CONFIG_BYTES, ConfigError)
    elif name in config_names() and path.parent == Path():
        data = (_folder() / f"{name}.yaml").read_bytes()
    else:
        near = get_close_matches(name, config_names(), 1)
        raise UsageError(
            f"there is no quantization config '{name_or_path}'",
            hint=(f"the nearest is {near[0]}; " if near else "")
            + "`tpuconv quantize --list` shows all; or give a file",
        )
    return parse_config(data, name, str(path))


def check_rules(config: QuantConfig, modules: Iterable[str]) -> None:
    """Checks that the patterns of all rules can be matched with the names of modules (`layers/0/attn`).

    Raises:
        ConfigError: a pattern is invalid, or takes too long.
    """
    patterns = [(f"{config.name}, line {rule.line}", rule.module_path) for rule in config.rules]
    check_patterns(patterns, modules, ConfigError)


def modules_of(table: MappingTable, config: HasAxes) -> dict[str, None]:
    """The modules of a table's parameters (`layers.0.attn.q.kernel`) and their parents, as rules name them. Does not
    build the model, which needs jax."""
    out: dict[str, None] = {}
    for binding in table.bind(config):
        for name in (name for stack in binding.dst for name in stack.names):
            parts = name.split(".")
            out |= dict.fromkeys("/".join(parts[:n]) for n in range(len(parts)))
    return out


def _folder() -> Any:
    return files("tpuconv") / "quant_configs"


def parse_config(data: bytes, name: str, path: str) -> QuantConfig:
    """Parses the bytes of a YAML file. `name` is the config's name, `path` the file that errors name.

    Raises:
        ConfigError: something in it is not valid, with line and column.
    """
    return _parse_root(_Value(_compose(data, path), path, "the file"), name)


def _parse_root(root: "_Value", name: str) -> QuantConfig:
    top = root.mapping("summary", "qwix", "gates")
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
    return QuantConfig(
        name=name,
        summary=top["summary"].text() if "summary" in top else name,
        rules=rules,
        scale_dtype=qwix["scale_dtype"].choice(SCALE_DTYPES, null=True) if "scale_dtype" in qwix else None,
        gates=_gates(top["gates"]) if "gates" in top else default_gates(rules),
    )


def _gates(value: "_Value") -> dict[str, float]:
    if value.is_scalar("none"):
        return {}
    return {name: gate.number(GATE_LIMITS[name], least=0) for name, gate in value.mapping(*GATE_LIMITS).items()}


def default_gates(rules: Iterable[Rule]) -> dict[str, float]:
    """The gates of a config that names none: those of the class of `LOSS_CLASSES` with the most loss that a rule is
    in."""
    classes = [_loss_class(rule) for rule in rules if rule.weight_qtype]
    return dict(LOSS_CLASSES[max(classes, default=0)])


def _loss_class(rule: Rule) -> int:
    """The number of a rule's class in `LOSS_CLASSES`."""
    if QTYPES[str(rule.weight_qtype)] < 8:
        return 2
    return int(rule.weight_qtype != "int8" or rule.act_qtype is not None)


def _rule(value: "_Value") -> Rule:
    fields = value.mapping(*RULE_FIELDS, "act_static_scale", "act_batch_axes")
    given: dict[str, Any] = {}
    for name in ("act_static_scale", "act_batch_axes"):
        if name in fields and not fields[name].is_null() and fields[name].node.value not in ("false", "False"):
            raise fields[name].error(f"{name} is not implemented: it needs calibration", hint="leave it out")
    if "module_path" in fields:
        given["module_path"] = fields["module_path"].text()
    if "op_names" in fields:
        given["op_names"] = tuple(item.text() for item in fields["op_names"].sequence())
    for name in ("weight_qtype", "act_qtype"):
        if name in fields:
            given[name] = fields[name].choice(tuple(QTYPES), null=True)
    for name in ("weight_calibration_method", "act_calibration_method"):
        if name in fields and not fields[name].is_null():
            given[name] = fields[name].method()
    if "tile_size" in fields and not fields["tile_size"].is_null():
        tile = given["tile_size"] = fields["tile_size"].number(1 << 31)
        if tile <= 0 or (isinstance(tile, float) and tile > 1):
            raise fields["tile_size"].error("tile_size is a number of elements, or a fraction of the axis")
    rule = Rule(value.line, **given)
    for qtype in (rule.weight_qtype, rule.act_qtype):
        if qtype in REQUIRED_TILE_SIZES and rule.tile_size != REQUIRED_TILE_SIZES[qtype]:
            raise value.error(f"{qtype} needs tile_size: {REQUIRED_TILE_SIZES[qtype]}")
    for qtype, method in (
        (rule.weight_qtype, rule.weight_calibration_method),
        (rule.act_qtype, rule.act_calibration_method or "absmax"),
    ):
        if _is_asymmetric(method) and qtype not in (None, "int8", "int4"):
            raise value.error(f"{method} works with int8 and int4, not with {qtype}")
    return rule


def _is_asymmetric(method: str) -> bool:
    name, *numbers = method.split(",")
    return name == "minmax" or (len(numbers) == 2 and sum(map(float, numbers)) != 0)


_OCTAL = re.compile(r"[+-]?0\d")


# -- YAML, strictly ---------------------------------------------------------------------------------------------------


def _compose(data: bytes, path: str) -> yaml.Node:
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has {len(data)} bytes, more than a config can have")
    try:
        depth = 0
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise _error_at(path, event, "anchors and aliases are not allowed")
            if getattr(event, "tag", None):
                raise _error_at(path, event, "tags are not allowed")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _error_at(path, event, "nested too deep")
        node = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{path} is not valid YAML{place}: {getattr(e, 'problem', None) or e}") from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not text: {e}") from None
    if node is None:
        raise ConfigError(f"{path} is empty", hint="a config is {qwix: {rules: [...]}}")
    return node


def _node(value: Any, line: int = 0) -> yaml.Node:
    """A JSON value as YAML parses it. The items of a list have lines of their own."""
    mark = yaml.Mark("", 0, line, 0, None, 0)
    match value:
        case dict():
            pairs = [(_node(key, line), _node(item, line)) for key, item in value.items()]
            return yaml.MappingNode("tag:yaml.org,2002:map", pairs, mark, mark)
        case list() | tuple():
            items = [_node(item, i) for i, item in enumerate(value)]
            return yaml.SequenceNode("tag:yaml.org,2002:seq", items, mark, mark)
        case None | bool() | int() | float() | str():
            text = value if isinstance(value, str) else repr(value).lower()
            return yaml.ScalarNode(f"tag:yaml.org,2002:{TAGS[type(value)]}", text, mark, mark)
    raise TypeError(f"{value!r} is no value of JSON")


TAGS = {type(None): "null", bool: "bool", int: "int", float: "float", str: "str"}


def _error_at(path: str, where: Any, what: str, hint: str | None = None) -> ConfigError:
    mark = where.start_mark
    return ConfigError(f"{path}, line {mark.line + 1}, column {mark.column + 1}: {what}", hint=hint)


def _node_text(node: Any) -> str:
    """A node as errors show it."""
    if isinstance(node, yaml.ScalarNode):
        return short(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


@dataclass(frozen=True)
class _Value:
    """A node of the file. Each method returns it as one type."""

    node: Any
    path: str
    name: str

    @property
    def line(self) -> int:
        return int(self.node.start_mark.line) + 1

    def error(self, what: str, hint: str | None = None) -> ConfigError:
        return _error_at(self.path, self.node, f"{self.name}: {what}", hint)

    def mapping(self, *known: str) -> dict[str, "_Value"]:
        """The values by key. Raises ConfigError for an unknown or duplicate key."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"must be a mapping with {', '.join(known)}")
        out: dict[str, _Value] = {}
        for key, value in self.node.value:
            if key.value not in known:
                near = get_close_matches(str(key.value), known, 1)
                raise _error_at(
                    self.path, key, f"unknown key {_node_text(key)}", f"known are {', '.join(known)}"
                    + (f"; did you mean {near[0]}?" if near else ""),
                )  # fmt: skip
            if key.value in out:
                raise _error_at(self.path, key, f"{_node_text(key)} is a duplicate key")
            out[key.value] = _Value(value, self.path, key.value)
        return out

    def sequence(self) -> Iterator["_Value"]:
        """Yields the items."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("must be a list")
        for item in self.node.value:
            yield _Value(item, self.path, f"an item of {self.name}")

    def is_scalar(self, text: str) -> bool:
        """Whether it is this word."""
        return self._tag() == "str" and self.node.value == text

    def is_null(self) -> bool:
        """Whether it is null."""
        return self._tag() == "null"

    def text(self) -> str:
        """A string."""
        if self._tag() != "str":
            raise self.error("must be a text", hint="put it in quotes")
        return str(self.node.value)

    def boolean(self) -> bool:
        """True or false."""
        if self._tag() != "bool" or self.node.value.lower() not in ("true", "false"):
            raise self.error("must be true or false")
        return bool(self.node.value.lower() == "true")

    def number(self, most: float, *, least: float = -LARGEST_FACTOR) -> int | float:
        """A number from `least` to `most`. What YAML reads differently than it looks (`010`, `1:30`) is an error."""
        text = str(self.node.value)
        if self._tag() not in ("int", "float") or len(text) > 100 or _OCTAL.match(text):
            raise self.error(f"must be a number, not {text[:80]!r}")
        try:
            number = int(text) if self._tag() == "int" else float(text)
        except ValueError:
            raise self.error(f"must be a number, not {text!r}") from None
        if not least <= number <= most:
            raise self.error(f"must be a number from {least:g} to {most:g}, not {text}")
        return number

    def choice(self, known: tuple[str, ...], *, null: bool) -> str | None:
        """One of the `known` strings, or None for null if `null`."""
        if null and self.is_null():
            return None
        if self._tag() != "str" or self.node.value not in known:
            why = "; a missing value is written null" if self.node.value in ("None", "none") else ""
            raise self.error(f"unknown value {_node_text(self.node)}", hint=f"known are {', '.join(known)}{why}")
        return str(self.node.value)

    def method(self) -> str:
        """A calibration method with its numbers: absmax, minmax, rms or fixed."""
        name, *numbers = self.text().split(",")
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        if name not in METHODS or len(numbers) != len(values) or len(values) not in METHODS[name]:
            raise self.error(
                f"unknown calibration method {_node_text(self.node)}",
                hint="known are absmax, absmax,<factor>, minmax, minmax,<factor>, rms,<factor> and fixed,<min>,<max>",
            )
        if name == "fixed":
            low, high = values if len(values) == 2 else (-values[0], values[0])
            if not -LARGEST_FACTOR <= low <= 0 <= high <= LARGEST_FACTOR or low == high:
                raise self.error(
                    f"{_node_text(self.node)}: the range must go from 0 or less to 0 or more, and not be empty"
                )
        elif not all(1 / LARGEST_FACTOR <= factor <= LARGEST_FACTOR for factor in values):
            raise self.error(
                f"{_node_text(self.node)}: the factor must be from {1 / LARGEST_FACTOR:g} to {LARGEST_FACTOR:g}"
            )
        return self.text()

    def _tag(self) -> str:
        return str(self.node.tag).rpartition(":")[2] if isinstance(self.node, yaml.ScalarNode) else ""
