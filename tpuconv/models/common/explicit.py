"""Models on meshes with explicit axes, such as the meshes of `jax.make_mesh`: there each operation states how its
result is sharded. Within a model the compiler chooses; outside of it arrays are on the mesh that the user gave."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tpuconv.models.common.cache import Cache, cache_shardings
from tpuconv.notation.sharding import ACTIVATIONS, partition


def is_explicit(x: jax.Array) -> bool:
    """Returns whether an array is on a mesh that has explicit axes."""
    mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
    return mesh is not None and AxisType.Explicit in mesh.axis_types


def call_on_explicit_mesh(
    model: nnx.Module, weights: jax.Array, ids_BT: Any, mask_BT: Any, cache: Cache | None, first: int, seen: Any
) -> Any:
    """Calls a model on a mesh with explicit axes, the mesh of `weights`, one of its arrays. The results are sharded
    over the batch, caches as `cache_shardings` has them."""

    def run(model: Any, ids_BT: Any, mask_BT: Any, cache: Cache | None, seen: Any) -> Any:
        return model(ids_BT, mask_BT, first=first, seen=seen, **({} if cache is None else {"cache": cache}))

    mesh: Any = jax.typeof(weights).sharding.mesh
    out: Any = PartitionSpec(*partition("B", ids_BT.shape[:1], dict(mesh.shape), ACTIVATIONS))  # type: ignore[no-untyped-call]
    if cache is not None:
        out = out, jax.tree.map(lambda place: place.spec, cache_shardings(cache, mesh))
    return run_on_explicit_mesh(run, model, weights, out, ids_BT, mask_BT, cache, seen)


def run_on_explicit_mesh(
    run: Callable[..., Any], module: nnx.Module, weights: jax.Array, out: Any, *arrays: Any
) -> Any:
    """Calls `run` with a module and arrays on a mesh with explicit axes, the mesh of `weights`, an array of the module.
    The results have the sharding `out`."""
    graph, state = nnx.split(module)
    mesh: Any = jax.typeof(weights).sharding.mesh
    place: Any = None if isinstance(weights, jax.core.Tracer) else weights.sharding
    with jax.sharding.use_abstract_mesh(mesh) if place is None else jax.sharding.set_mesh(place.mesh):
        return jax.sharding.auto_axes(lambda state, *arrays: run(nnx.merge(graph, state), *arrays), out_sharding=out)(
            state, *arrays
        )


def on_automatic_mesh(tree: Any) -> Any:
    """Returns the arrays of a tree on the same devices, on meshes whose axes are automatic. Others are left as they
    are."""

    def moved(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding) or not is_explicit(x):
            return x
        mesh = x.sharding.mesh
        return jax.device_put(x, NamedSharding(Mesh(mesh.devices, mesh.axis_names), x.sharding.spec))

    return jax.tree.map(moved, tree)
