"""Checkpoints of language models for JAX: `tpuconv.load(path)` returns a model, the command `tpuconv` does the rest."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpuconv.restore import load as load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    # jax is imported when a model is asked for, not when the command line starts.
    if name == "load":
        from tpuconv.restore import load

        return load
    raise AttributeError(f"module 'tpuconv' has no attribute '{name}'")
