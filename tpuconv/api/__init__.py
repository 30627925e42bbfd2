"""The Python interface: one function for each command. Functions return dataclasses, never print, and raise children of
`tpuconv.errors.TpuconvError`. `progress` is called with a `Progress` while long work runs.

    from tpuconv import api

    conversion = api.convert("Qwen/Qwen3-8B", "/data/Qwen3-8B")
    assert api.verify(conversion.out).passed

Importing this module imports neither jax nor numpy; a name is imported when it is asked for (`__init__.pyi` lists all),
and a function imports what it needs when it is called.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_PLACES = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module
    for alias in node.names
}
"""The module of each name."""

__all__ = sorted(_PLACES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'tpuconv.api' has no attribute '{name}'")
    return globals().setdefault(name, getattr(import_module(_PLACES[name]), name))


def __dir__() -> list[str]:
    return __all__
