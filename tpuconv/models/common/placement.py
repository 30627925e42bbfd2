"""Where arrays lie while a model runs on a mesh: by the letters of their axes, as parameters do."""

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpuconv.layout import Shape
from tpuconv.sharding import ACTIVATIONS, BY_HEAD, Rules, attention_rules, partition


def sharding(axes: str, shape: Shape, mesh: Mesh, rules: Rules) -> NamedSharding:
    """Where an array with these axes ("D N H") lies on a mesh by `rules`."""
    spec = PartitionSpec(*partition(axes, shape, dict(mesh.shape), rules))  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, spec)


def automatic_mesh() -> Any | None:
    """The mesh that `jax.sharding.set_mesh` has set; None without one, or where placement is not the compiler's to
    choose."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types) else mesh


def rules_for(layer: Any, mesh: Any | None = None) -> Rules:
    """How attention with one layer's cache, or the keys and values of a call without one, is divided over the mesh."""
    mesh = automatic_mesh() if mesh is None else mesh
    if mesh is None:
        return BY_HEAD
    arrays = jax.tree.leaves(layer)
    nbytes = sum(x.size * x.dtype.itemsize for x in arrays)
    return attention_rules(type(layer).axes[0], arrays[0].shape, nbytes, dict(mesh.shape))


def placed(x: jax.Array, axes: str, rules: Rules = ACTIVATIONS) -> jax.Array:
    """`x`, laid over the mesh as `rules` have it for its axes ("B T D"). Without a mesh `x` as it is."""
    mesh = automatic_mesh()
    if mesh is None:
        return x
    spec = PartitionSpec(*partition(axes, x.shape, dict(mesh.shape), rules))  # type: ignore[no-untyped-call]
    out: jax.Array = jax.lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return out
