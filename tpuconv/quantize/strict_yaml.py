"""YAML, read strictly. What YAML allows and surprises (duplicate keys, `None`, which is a string, `no`, which is False,
aliases that expand to gigabytes) is an error with line and column.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from tpuconv.errors import ConfigError
from tpuconv.jsonfile import short

MAX_CONFIG_BYTES, MAX_DEPTH = 1 << 20, 20
LEAST_NUMBER = -1e6

YAML_HINTS = {
    "escape": "write patterns in single quotes, where \\ is a character",
    "'\\t'": "indent with spaces",
    "another document": "write one config in a file, without ---",
}
"""Hints for faults of YAML, by a part of PyYAML's message."""

_OCTAL = re.compile(r"[+-]?0\d")


def compose(data: bytes, path: str) -> yaml.Node:
    """Returns the root of a YAML file. Raises ConfigError if it is no valid YAML, or has what is not allowed."""
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has {len(data)} bytes, more than a config can have")
    try:
        depth = 0
        for event in yaml.parse(data, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
                raise _error_at(path, event, "anchors and aliases are not allowed", "write the value out")
            if getattr(event, "tag", None):
                raise _error_at(path, event, "tags are not allowed", "leave it out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise _error_at(path, event, "nested too deep")
        node = yaml.compose(data, Loader=yaml.SafeLoader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(e, "problem", None) or str(e)
        hint = next((hint for word, hint in YAML_HINTS.items() if word in problem), None)
        raise ConfigError(f"{path} is not valid YAML{place}: {problem}", hint=hint) from None
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path} is not text: {e}") from None
    if node is None:
        raise ConfigError(f"{path} is empty", hint="a config is {qwix: {rules: [...]}}")
    return node


def yaml_node(value: Any, line: int = 0) -> yaml.Node:
    """Returns a JSON value as YAML parses it. The items of a list have lines of their own."""
    mark = yaml.Mark("", 0, line, 0, None, 0)
    match value:
        case dict():
            pairs = [(yaml_node(key, line), yaml_node(item, line)) for key, item in value.items()]
            return yaml.MappingNode("tag:yaml.org,2002:map", pairs, mark, mark)
        case list() | tuple():
            items = [yaml_node(item, i) for i, item in enumerate(value)]
            return yaml.SequenceNode("tag:yaml.org,2002:seq", items, mark, mark)
        case None | bool() | int() | float() | str():
            text = value if isinstance(value, str) else repr(value).lower()
            return yaml.ScalarNode(f"tag:yaml.org,2002:{TAGS[type(value)]}", text, mark, mark)
    raise TypeError(f"{value!r} is no value of JSON")


TAGS = {type(None): "null", bool: "bool", int: "int", float: "float", str: "str"}


def _error_at(path: str, where: Any, what: str, hint: str | None = None) -> ConfigError:
    mark = where.start_mark
    return ConfigError(f"{path}, line {mark.line + 1}, column {mark.column + 1}: {what}", hint=hint)


def node_text(node: Any) -> str:
    """Returns a node as errors show it."""
    if isinstance(node, yaml.ScalarNode):
        return short(node.value)
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


@dataclass(frozen=True)
class YamlValue:
    """A node of the file. Each method returns it as one type."""

    node: Any
    path: str
    name: str

    @property
    def line(self) -> int:
        return int(self.node.start_mark.line) + 1

    def error(self, what: str, hint: str | None = None) -> ConfigError:
        return _error_at(self.path, self.node, f"{self.name}: {what}", hint)

    def mapping(self, *known: str) -> dict[str, "YamlValue"]:
        """Returns the values by key. Raises ConfigError for an unknown or duplicate key."""
        if not isinstance(self.node, yaml.MappingNode):
            raise self.error(f"must be a mapping with {', '.join(known)}", hint=f"write {{{known[0]}: ...}}")
        out: dict[str, YamlValue] = {}
        for key, value in self.node.value:
            if key.value not in known:
                near = get_close_matches(str(key.value), known, 1)
                raise _error_at(
                    self.path, key, f"unknown key {node_text(key)}", f"known are {', '.join(known)}"
                    + (f"; did you mean {near[0]}?" if near else ""),
                )  # fmt: skip
            if key.value in out:
                raise _error_at(self.path, key, f"{node_text(key)} is a duplicate key")
            out[key.value] = YamlValue(value, self.path, key.value)
        return out

    def sequence(self) -> Iterator["YamlValue"]:
        """Yields the items."""
        if not isinstance(self.node, yaml.SequenceNode):
            raise self.error("must be a list", hint="write [...], or a line with a dash for each item")
        for item in self.node.value:
            yield YamlValue(item, self.path, f"an item of {self.name}")

    def is_scalar(self, text: str) -> bool:
        """Returns True if the node is this word."""
        return self._tag() == "str" and self.node.value == text

    def is_null(self) -> bool:
        """Returns True if the node is null."""
        return self._tag() == "null"

    def text(self) -> str:
        """Returns a string."""
        if self._tag() != "str":
            raise self.error("must be a text", hint="put it in quotes")
        return str(self.node.value)

    def boolean(self) -> bool:
        """True or false."""
        if self._tag() != "bool" or self.node.value.lower() not in ("true", "false"):
            raise self.error("must be true or false")
        return bool(self.node.value.lower() == "true")

    def number(self, most: float, *, least: float = LEAST_NUMBER) -> int | float:
        """Returns a number from `least` to `most`. What YAML reads differently than it looks (`010`, `1:30`) is an
        error."""
        text = str(self.node.value)
        if self._tag() not in ("int", "float") or len(text) > 100 or _OCTAL.match(text):
            is_text = self._tag() == "str" and text.replace(".", "", 1).isdigit()
            hint = "leave out the quotes" if is_text else None
            raise self.error(f"must be a number, not {node_text(self.node)}", hint=hint)
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
            raise self.error(f"unknown value {node_text(self.node)}", hint=f"known are {', '.join(known)}{why}")
        return str(self.node.value)

    def _tag(self) -> str:
        return str(self.node.tag).rpartition(":")[2] if isinstance(self.node, yaml.ScalarNode) else ""
