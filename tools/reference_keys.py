"""Writes tpuconv/models/common/reference_keys.json, the keys of config.json that transformers reads by model type, and
reference_defaults.json beside it, the defaults of the keys.

    python tools/reference_keys.py

Run it after an update of transformers; a test says when the tables are out of date. A key counts as read where it is a
field of the config's class or another name of one, or where the code of the model, or what all models share, asks a
config for it. So the table rather has a key too many, which is refused, than one too few.
"""

import inspect
import json
import math
import re
from collections.abc import Iterator
from dataclasses import MISSING
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from tpuconv.models.common.config_keys import NO_EFFECT
from tpuconv.models.common.rope import ROPE_KEYS
from tpuconv.models.registry import all_families
from tpuconv.models.wrappers import WRAPPERS
from tpuconv.verify.reference_types import READ_AS

TABLE = Path(__file__).parent.parent / "tpuconv" / "models" / "common" / "reference_keys.json"
DEFAULTS = TABLE.with_name("reference_defaults.json")
PLAIN_THETA = 10_000.0
"""The base of rotary positions of most models, which is not repeated."""
SHARED = (
    *("configuration_utils", "modeling_rope_utils", "masking_utils", "cache_utils", "modeling_layers"),
    *("modeling_utils", "integrations.moe", "integrations.sdpa_attention", "integrations.flash_attention"),
)
ASKED = (
    r"config\.([a-z]\w*)",
    r"(?:getattr|hasattr)\(\s*[\w.]*config[\w.()]*,\s*[\"'](\w+)[\"']",
    r"kwargs\.(?:pop|get|setdefault)\(\s*[\"'](\w+)[\"']",
    r"config_dict(?:\.(?:pop|get)\(|\[)\s*[\"'](\w+)[\"']",
)


def asked(module: str) -> Iterator[str]:
    """The names that the code of a module of transformers asks a config for."""
    source = inspect.getsource(import_module(f"transformers.{module}"))
    for pattern in ASKED:
        yield from re.findall(pattern, source)


def keys_of(model_type: str) -> set[str]:
    """The keys that the class of a model type, that of its text model and the code of the model read."""
    kind = type(AutoConfig.for_model(model_type))
    package = kind.__module__.removeprefix("transformers.").rpartition(".")[0]
    names = {*kind.__dataclass_fields__, *kind.attribute_map, *asked(kind.__module__.removeprefix("transformers."))}
    module = f"{package}.modeling_{package.rpartition('.')[2]}"
    if find_spec(f"transformers.{module}") is None:  # the model of another type is used
        causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING
        others = MODEL_FOR_CAUSAL_LM_MAPPING if causal else MODEL_FOR_MULTIMODAL_LM_MAPPING
        module = others[kind].__module__.removeprefix("transformers.")
    names |= set(asked(module))
    text = kind.sub_configs.get("text_config") or kind.sub_configs.get("thinker_config")
    return names | keys_of(text.model_type) if text and text is not AutoConfig else names


def aliases_of(model_type: str) -> dict[str, str]:
    """The other names of keys that the class of a model type and that of its text model read, and the keys."""
    kind = type(AutoConfig.for_model(model_type))
    text = kind.sub_configs.get("text_config")
    return kind.attribute_map | (aliases_of(text.model_type) if text and text is not AutoConfig else {})


def is_data(name: str) -> bool:
    """Whether a config can have it as a key: it is no method, and no part of the name of a file."""
    return not callable(getattr(PreTrainedConfig, name, None)) and name not in ("json", "py")


def table() -> tuple[list[str], dict[str, dict[str, str]], dict[str, list[str]]]:
    """The keys that every model reads, and for each model type of ours their other names and the keys that it reads
    besides."""
    types: dict[str, set[str]] = {}
    for family in all_families():
        for kind in family.architectures.values():
            if READ_AS.get(kind, kind) in CONFIG_MAPPING:  # else its code is in its releases alone
                types.setdefault(kind, set()).update(family.text_types)
    read = {
        kind: set().union(*(keys_of(READ_AS.get(name, name)) for name in (kind, *types[kind])))
        for kind in sorted(types)
    }
    shared = {name for module in SHARED for name in asked(module)} | set.intersection(*read.values())
    aliases: dict[str, dict[str, str]] = {}
    for kind in read:
        for name in (*sorted(types[kind]), kind):
            aliases.setdefault(kind, {}).update(aliases_of(READ_AS.get(name, name)))
    around = {kind: READ_AS.get(kind, kind) for kind in WRAPPERS}  # of whose text models others tell
    read |= {kind: keys_of(other) for kind, other in around.items() if other in CONFIG_MAPPING}
    return (
        sorted(filter(is_data, shared)),
        {kind: dict(sorted(names.items())) for kind, names in aliases.items() if names},
        {kind: sorted(filter(is_data, names - shared)) for kind, names in sorted(read.items())},
    )


def defaults_of(model_type: str) -> dict[str, Any]:
    """The defaults of the keys of a model type, or of its text model, under each of their names. Keys without effect
    are left out."""
    kind = CONFIG_MAPPING[model_type]
    if text := kind.sub_configs.get("text_config") or kind.sub_configs.get("thinker_config"):
        return {} if text is AutoConfig else defaults_of(text.model_type)
    found = {}
    for name, field in kind.__dataclass_fields__.items():
        if name not in {*PreTrainedConfig.__dataclass_fields__, *NO_EFFECT, *ROPE_KEYS}:
            found[name] = field.default if field.default_factory is MISSING else field.default_factory()
    found |= {alias: found[name] for alias, name in kind.attribute_map.items() if name in found}
    if (theta := getattr(kind, "default_theta", PLAIN_THETA)) != PLAIN_THETA:
        found["rope_theta"] = theta
    return {name: value for name, value in sorted(found.items()) if is_plain(value)}


def is_plain(value: Any) -> bool:
    """Whether a value is one that a config has as a field: null, a string, a finite number, or a list of these."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and math.isfinite(value))


def defaults_text() -> str:
    """The file of defaults: one line for each model type."""
    kinds = {READ_AS.get(kind, kind) for family in all_families() for kind in family.architectures.values()}
    known = {kind: defaults_of(kind) for kind in sorted(kinds) if kind in CONFIG_MAPPING}
    return "{\n" + ",\n".join(f'"{kind}": {json.dumps(found)}' for kind, found in known.items() if found) + "\n}\n"


def text() -> str:
    """The file."""
    shared, aliases, read = table()
    version = transformers.__version__
    return json.dumps({"transformers": version, "shared": shared, "aliases": aliases, **read}, indent=1) + "\n"


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
    DEFAULTS.write_text(defaults_text(), encoding="utf-8")
