"""The arrays of jax for layouts and changes of values, and the compiled programs of a stream."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from tpuconv.notation.arrays import ArrayModule
from tpuconv.weight_map.layers import LayerStep, layers_of
from tpuconv.weight_map.local import letters_divided, spec_of
from tpuconv.weight_map.steps import MapStep, NamedStep


def _divided(values: jax.Array, constant: np.float32) -> jax.Array:
    """Returns the quotients that numpy has. XLA makes `x / c` of a constant the product `x * (1 / c)`, which differs in
    the last digit, even behind an optimization barrier on a CPU. So the divisor depends on the values."""
    return values / jnp.where(values == values, constant, np.float32(1))  # noqa: PLR0124


def _rounded(values: jax.Array, dtype: Any) -> jax.Array:
    """Returns the values in a dtype. XLA may leave out a conversion that is followed by the opposite one, but no
    `reduce_precision`."""
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    rounded = jax.lax.reduce_precision(values, info.nexp, info.nmant)
    if info.tiny > jnp.finfo(values.dtype).tiny:  # type: ignore[no-untyped-call]
        # It makes zeros of subnormal numbers. They are multiples of a power of two, so that the products are exact.
        step = np.float32(info.smallest_subnormal)
        rounded = jnp.where(jnp.abs(values) < np.float32(info.tiny), jnp.round(values / step) * step, rounded)
    return rounded.astype(dtype)


JAX = ArrayModule(jnp.concatenate, jnp.expand_dims, _divided, _rounded)
"""The functions of jax."""


def all_steps(
    steps: Sequence[NamedStep], arrays: Mapping[str, Any], shardings: Callable[[Any], Mapping[str, NamedSharding]]
) -> dict[str, jax.Array]:
    """Returns the arrays of the target that the steps of a map make.

    Args:
        steps: of the map.
        arrays: of the source, by name.
        shardings: returns the sharding of each array of the target on a mesh.
    """
    given = {name: jnp.asarray(x) for name, x in arrays.items()}

    def made(given: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        out: dict[str, jax.Array] = {}
        for named in steps:
            out |= zip(named.dst, named.step([given[name] for name in named.src], JAX), strict=True)
        return out

    meshes: Iterator[Any] = (jax.typeof(x).sharding.mesh for x in given.values())
    mesh = next((each for each in meshes if each.explicit_axes), None)
    if mesh is None:
        return made(given)
    # On explicit axes each operation would have to say how its result is sharded, and some cannot.
    placed = jax.sharding.auto_axes(made, axes=mesh.explicit_axes, out_sharding=dict(shardings(mesh)))
    out: dict[str, jax.Array] = placed(given)
    return out


Described = jax.ShapeDtypeStruct
"""The shape, dtype and sharding of an array."""


@dataclass(frozen=True)
class Call:
    """A run of one program.

    Attributes:
        program: the compiled program. Its arguments are the arrays of the source, the arrays of the target if it
            updates them in place, and the number of the layer; it returns the arrays of the target.
        src, dst: the names of these arrays.
        layer: the number of the layer; 0 if the program has all.
        begins: the arrays of the target that are zeros before this call.
        frees: the arrays of the source that no later call needs.
        done: the arrays of the target that are complete.
        updates: whether the arrays of the target are arguments, which the program updates.
    """

    program: Any
    src: tuple[str, ...]
    dst: tuple[str, ...]
    layer: int
    begins: Mapping[str, Described]
    frees: tuple[str, ...]
    done: tuple[str, ...]
    updates: bool


def calls(
    steps: Sequence[NamedStep], src: Mapping[str, Described], dst: Mapping[str, Described], *, free: bool
) -> Iterator[Call]:
    """Yields the calls that make one tree of another one, in order. Programs are compiled when they are first needed;
    steps that are alike share one.

    Args:
        steps: of the map.
        src, dst: the arrays of both trees.
        free: whether the arrays of the source are not needed afterwards.
    """
    for named in steps:
        ours = tuple(_key(src[name]) for name in named.src)
        theirs = tuple(_key(dst[name]) for name in named.dst)
        layers = layers_of(named.step)
        if layers is None:
            yield Call(
                _program(named.step, ours, theirs, free),
                named.src,
                named.dst,
                0,
                {},
                named.src,
                named.dst,
                updates=False,
            )
            continue
        stacked_src, stacked_dst = bool(layers.one.src_axes), bool(layers.one.dst_axes)
        for layer, (sources, targets) in enumerate(zip(layers.src, layers.dst, strict=True)):
            ends = layer == layers.count - 1
            names, made = tuple(named.src[i] for i in sources), tuple(named.dst[i] for i in targets)
            yield Call(
                _layer_program(layers.one, tuple(ours[i] for i in sources), tuple(theirs[i] for i in targets), free),
                names,
                made,
                layer,
                {name: dst[name] for name in made} if stacked_dst and not layer else {},
                () if stacked_src and not ends else names,
                () if stacked_dst and not ends else made,
                updates=stacked_dst,
            )


_ArrayKey = tuple[tuple[int, ...], np.dtype, Sharding]


def _key(array: Described) -> _ArrayKey:
    return array.shape, np.dtype(array.dtype), array.sharding


def _struct(key: _ArrayKey) -> Described:
    shape, dtype, sharding = key
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_automatic(sharding))  # type: ignore[no-untyped-call]


def _automatic(sharding: Sharding) -> Sharding:
    """Returns the same sharding on a mesh whose axes are automatic: the compiler then chooses the shardings between
    source and target, which are explicit on a mesh of `jax.make_mesh`."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return sharding
    mesh = sharding.mesh
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return NamedSharding(automatic, sharding.spec)


@cache
def _program(step: MapStep, src: tuple[_ArrayKey, ...], dst: tuple[_ArrayKey, ...], free: bool) -> Any:
    """The program of a complete step. An array of the source that is not needed any more is donated: where a result has
    its size, no further memory is needed."""
    run = _placed(step, src, dst)
    jitted = jax.jit(
        lambda arrays, stacked, layer: run(arrays),
        out_shardings=[key[2] for key in dst],
        donate_argnums=(0,) if free else (),
    )
    return _compiled(jitted, src, ())


@cache
def _layer_program(one: LayerStep, src: tuple[_ArrayKey, ...], dst: tuple[_ArrayKey, ...], free: bool) -> Any:
    """The program of one layer, whose number is an operand."""
    small_src = tuple(_of_layer(key, one.src_axes, i) for i, key in enumerate(src))
    small_dst = tuple(_of_layer(key, one.dst_axes, i) for i, key in enumerate(dst))
    run = _placed(one.step, small_src, small_dst)

    def of_layer(arrays: list[jax.Array], stacked: list[jax.Array], layer: jax.Array) -> list[jax.Array]:
        if one.src_axes:
            arrays = [
                jax.lax.dynamic_slice_in_dim(x, layer, 1, axis) for x, axis in zip(arrays, one.src_axes, strict=True)
            ]
        made: list[jax.Array] = run(arrays)
        if not one.dst_axes:
            return made
        return [
            jax.lax.dynamic_update_slice_in_dim(whole, x, layer, axis)
            for whole, x, axis in zip(stacked, made, one.dst_axes, strict=True)
        ]

    jitted = jax.jit(
        of_layer,
        out_shardings=[key[2] for key in dst],
        donate_argnums=(1,) if one.src_axes or not free else (0, 1),
    )
    return _compiled(jitted, src, dst if one.dst_axes else ())


def _compiled(jitted: Any, src: tuple[_ArrayKey, ...], stacked: tuple[_ArrayKey, ...]) -> Any:
    with warnings.catch_warnings():  # a buffer of another size than each result is freed after the call all the same
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        lowered = jitted.lower([*map(_struct, src)], [*map(_struct, stacked)], np.int32(0))
        return lowered.compile()


def _of_layer(key: _ArrayKey, axes: tuple[int, ...], number: int) -> _ArrayKey:
    """Returns the part of an array that one layer has."""
    shape, dtype, sharding = key
    return (tuple(1 if i == axes[number] else n for i, n in enumerate(shape)), dtype, sharding) if axes else key


def _placed(step: MapStep, src: tuple[_ArrayKey, ...], dst: tuple[_ArrayKey, ...]) -> Any:
    """Returns the function of a step: by parts of devices if each can do it alone, else for the compiler to divide."""
    shardings = [key[2] for key in (*src, *dst)]
    named = [each for each in map(_automatic, shardings) if isinstance(each, NamedSharding)]
    if len(named) == len(shardings) and all(each.mesh == named[0].mesh for each in named):
        mesh = named[0].mesh
        sizes = dict(mesh.shape)
        specs = [spec_of(tuple(each.spec), sizes) for each in named]
        parts = letters_divided(step, specs, sizes)
        if parts is not None:
            placed = [PartitionSpec(*(names or None for names in spec)) for spec in specs]  # type: ignore[no-untyped-call]
            return jax.shard_map(
                lambda arrays: step(arrays, JAX, parts),
                mesh=mesh,
                in_specs=(placed[: len(src)],),
                out_specs=placed[len(src) :],
            )
    return lambda arrays: step(arrays, JAX)
