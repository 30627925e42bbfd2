"""Shardings of arrays while a model runs on a mesh. They follow from the letters of axes, as for parameters."""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpuconv.errors import UsageError
from tpuconv.notation.layout import Shape
from tpuconv.notation.sharding import ACTIVATIONS, AXES, BY_HEAD, Rules, attention_rules, partition


def sharding(axes: str, shape: Shape, mesh: Mesh, rules: Rules) -> NamedSharding:
    """Returns the sharding of an array with these axes ("D N H") on a mesh, by `rules`."""
    spec = PartitionSpec(*partition(axes, shape, dict(mesh.shape), rules))  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, spec)


def check_axes(mesh: Mesh) -> None:
    """Raises UsageError if nothing is sharded over an axis of a mesh."""
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if len(unknown) == len(mesh.axis_names) or any(mesh.shape[name] > 1 for name in unknown):
        raise UsageError(
            f"nothing is sharded over the axes {', '.join(unknown)} of a mesh: each part would hold a copy",
            hint=f"use one or more of the axes {', '.join(AXES)}",
        )


def automatic_mesh() -> Any | None:
    """Returns the mesh of `jax.sharding.set_mesh`; None if none is set, or if one of its axes is not automatic (then
    the compiler does not choose shardings)."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types) else mesh


def rules_for(layer: Any, mesh: Any | None = None) -> Rules:
    """Returns the sharding rules of attention with one layer's cache, or with a call's keys and values if there is no
    cache. The mesh is `automatic_mesh()` by default."""
    mesh = automatic_mesh() if mesh is None else mesh
    if mesh is None:
        return BY_HEAD
    arrays = jax.tree.leaves(layer)
    nbytes = sum(x.size * x.dtype.itemsize for x in arrays)
    return attention_rules(type(layer).axes[0], arrays[0].shape, nbytes, dict(mesh.shape))


def placed(x: jax.Array, axes: str, rules: Rules = ACTIVATIONS) -> jax.Array:
    """Returns `x` with a sharding constraint on the current mesh, by `rules` for its axes ("B T D"). Without a mesh,
    returns `x`."""
    mesh = automatic_mesh()
    if mesh is None:
        return x
    spec = PartitionSpec(*partition(axes, x.shape, dict(mesh.shape), rules))  # type: ignore[no-untyped-call]
    out: jax.Array = jax.lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return out
