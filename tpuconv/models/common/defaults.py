"""Fills the defaults of a Config's fields from transformers, so that a family does not repeat them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, dataclass_transform

from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.common.rope import Rope

AnyConfig = TypeVar("AnyConfig", bound=DecoderConfig)


@cache
def reference_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Returns the defaults of the keys of config.json by model type; tools/reference_keys.py writes them."""
    path = files("tpuconv") / "models" / "common" / "reference_defaults.json"
    table: Mapping[str, Mapping[str, Any]] = json.loads(path.read_bytes())
    return table


@dataclass_transform(frozen_default=True, kw_only_default=True)
def family_config(cls: type[AnyConfig]) -> type[AnyConfig]:
    """Makes a frozen dataclass of a family's Config. A field gets the default that the class gives it, else the one
    that transformers has for its key and the `model_type` of the class, else the one of a base class."""
    known = dict(reference_defaults().get(cls.model_type, {}))
    if "rope_theta" in known and "default_rope" not in vars(cls):
        cls.default_rope = {"rope_theta": known["rope_theta"]}
    if "default_rope" in vars(cls):
        known["rope"] = Rope.from_hf({"rope_parameters": cls.default_rope}, cls.model_type, 0)
    bases = filter(is_dataclass, reversed(cls.__mro__[1:]))
    types = {field.name: field.type for base in bases for field in fields(base)}
    for name, kind in {**types, **cls.__annotations__}.items():
        key = cls.hf_names.get(name, name)
        if key in known and name not in vars(cls):
            cls.__annotations__[name] = kind
            setattr(cls, name, _as_field(known[key], kind))
    return dataclass(frozen=True, kw_only=True)(cls)


def _as_field(value: Any, kind: Any) -> Any:
    """Returns a value of JSON as a Config has it."""
    if isinstance(value, list):
        return tuple(value)
    return float(value) if kind is float and value is not None else value
