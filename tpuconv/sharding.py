"""From letters to mesh axes: how a parameter is laid over devices follows from the letters of its axes."""

from collections.abc import Mapping

from tpuconv.layout import Shape, lead, parse_axes

MESH_AXES: Mapping[str, str] = {
    "V": "tensor",
    "N": "tensor",
    "K": "tensor",
    "F": "tensor",
    "M": "tensor",
    "E": "expert",
    "D": "data",
}
"""The mesh axis over which an axis is divided: heads and feed-forward as in Megatron-LM (arXiv:1909.08053), the model
width fully sharded as in ZeRO (arXiv:1910.02054)."""


def partition(axes: str, shape: Shape, mesh: Mapping[str, int]) -> tuple[str | None, ...]:
    """For every axis of a parameter the mesh axis that divides it, or None.

    `axes` is the parameter's letters ("D N H"), `mesh` the size of each mesh axis. An axis whose size the mesh axis
    does not divide stays whole, and a mesh axis divides at most one axis of a parameter.
    """
    taken: set[str] = set()
    parts: list[str | None] = []
    for axis_letters, size in zip(parse_axes(axes), shape, strict=True):
        axis = MESH_AXES.get(lead(axis_letters), "")
        if axis not in mesh or axis in taken or size % mesh[axis]:
            parts.append(None)
        else:
            taken.add(axis)
            parts.append(axis)
    return tuple(parts)
