"""Writes tpuconv/models/common/reference_keys.py: the keys of config.json that transformers reads, for each model type.

    python tools/reference_keys.py

Run it after an update of transformers; a test says when the table is out of date. A key counts as read where it is a
field of the config's class or another name of one, or where the code of the model, or what all models share, asks a
config for it. So the table rather has a key too many, which is refused, than one too few.
"""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import transformers
from transformers import AutoConfig, PreTrainedConfig

from tpuconv.models.registry import all_families
from tpuconv.verify.logits import READ_AS

TABLE = Path(__file__).parent.parent / "tpuconv" / "models" / "common" / "reference_keys.py"
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
    """The keys that the class of a model type and the code of its model read; of a composite one the outer class."""
    kind = type(AutoConfig.for_model(model_type))
    package = kind.__module__.removeprefix("transformers.").rpartition(".")[0]
    names = {*kind.__dataclass_fields__, *kind.attribute_map, *asked(kind.__module__.removeprefix("transformers."))}
    return names | set(asked(f"{package}.modeling_{package.rpartition('.')[2]}"))


def is_data(name: str) -> bool:
    """Whether a config can have it as a key: it is no method, and no part of the name of a file."""
    return not callable(getattr(PreTrainedConfig, name, None)) and name not in ("json", "py")


def table() -> tuple[list[str], dict[str, list[str]]]:
    """The keys that every model reads, and for each model type of ours those that it reads besides."""
    types = sorted({kind for family in all_families() for kind in family.architectures.values()})
    read = {kind: keys_of(READ_AS.get(kind, kind)) for kind in types}
    shared = {name for module in SHARED for name in asked(module)} | set.intersection(*read.values())
    return sorted(filter(is_data, shared)), {k: sorted(filter(is_data, names - shared)) for k, names in read.items()}


def listed(names: list[str], indent: str) -> str:
    """Names in lines of at most 120 characters."""
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > 108:
            lines.append("")
        lines[-1] += f"{name} "
    return "".join(f'{indent}"{line}"\n' for line in lines)


def text() -> str:
    """The module."""
    shared, read = table()
    rows = "".join(f'    "{kind}": (\n{listed(names, " " * 8)}    ),\n' for kind, names in read.items())
    return f'''"""The keys of config.json that transformers {transformers.__version__} reads. Written by tools/reference_keys.py."""

from collections.abc import Mapping

SHARED = frozenset(
    (
{listed(shared, " " * 8)}    ).split()
)
"""Those that every model reads."""

_OWN = {{
{rows}}}

READ: Mapping[str, frozenset[str]] = {{kind: SHARED.union(names.split()) for kind, names in _OWN.items()}}
"""Model type to all keys that the reference reads."""
'''


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
