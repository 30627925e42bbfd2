"""Checkpoints of language models for JAX: `load` a model, `save` a changed one. `tpuconv.api` has a function for each
command."""

from typing import TYPE_CHECKING, Any

from tpuconv.forks import note_forks

if TYPE_CHECKING:
    from tpuconv.api.models import load, save

__all__ = ["load", "save"]

note_forks()


def __getattr__(name: str) -> Any:
    # The command line imports this module to start; jax is imported when a model is asked for.
    if name in __all__:
        from tpuconv.api import models

        return getattr(models, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("tpuconv")
    if name == "api":
        from importlib import import_module

        return import_module("tpuconv.api")
    raise AttributeError(f"module 'tpuconv' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__", "api"} - {"TYPE_CHECKING", "Any"})
