"""Where arrays lie while a model runs on a mesh: by the letters of their axes, as parameters do."""

import jax
from jax.sharding import AxisType, PartitionSpec

from tpuconv.sharding import ACTIVATIONS, Rules, partition


def placed(x: jax.Array, axes: str, rules: Rules = ACTIVATIONS) -> jax.Array:
    """`x`, laid over the mesh that `jax.sharding.set_mesh` has set as `rules` have it for its axes ("B T D"). Without a
    mesh, or where placement is not the compiler's to choose, `x` as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return x
    spec = PartitionSpec(*partition(axes, x.shape, dict(mesh.shape), rules))  # type: ignore[no-untyped-call]
    out: jax.Array = jax.lax.with_sharding_constraint(x, spec)  # type: ignore[no-untyped-call]
    return out
