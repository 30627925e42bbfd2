"""A map between two trees of the weights of a model: data, and a function on arrays in memory."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from tpuconv.convert.export.way_back import found_names, state_of
from tpuconv.errors import MappingError, UsageError, shorten
from tpuconv.names import LEAF, collapse
from tpuconv.weight_map.model import MappedModel
from tpuconv.weight_map.pairs import TreePairs, mapped_pairs
from tpuconv.weight_map.rows import MapRow, rows_of
from tpuconv.weight_map.steps import NamedStep, compose_steps
from tpuconv.weight_map.trees import MappedTree, TreeForm, form_in, parts_in, tree_rows

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding, Sharding

    from tpuconv.weight_map.on_devices import Call

SideName = Literal["source", "target"]


class WeightMap:
    """A map from one tree of a model's weights to another one. A call returns the arrays of the target, by name.

    Attributes:
        source, target: the trees.
        steps: the rows of both trees that share released tensors.
    """

    def __init__(self, source: MappedTree, target: MappedTree):
        self.source, self.target = source, target
        self.steps: tuple[NamedStep, ...] = compose_steps(source.rows, target.rows)

    @cached_property
    def rows(self) -> tuple[MapRow, ...]:
        """The map as data: a row for each kind of step."""
        return tuple(rows_of(self.steps))

    @cached_property
    def inverse(self) -> "WeightMap":
        """The map back. It gives the same values again where the rows are `exact`."""
        return WeightMap(self.target, self.source)

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {
            "source": self.source.form.to_json(),
            "target": self.target.form.to_json(),
            "exact": all(row.exact for row in self.rows),
            "rows": [row.to_json() for row in self.rows],
        }

    def __call__(self, tree: Any) -> "dict[str, jax.Array]":
        """Returns the arrays of the target by their full names. It may be jitted, with the shardings of `shardings`.
        Arrays on a mesh with explicit axes have these shardings in any case.

        Args:
            tree: the arrays of the source: a dict by full name, a nested dict or a state of Flax NNX, perhaps below
                other names such as `params`.

        Raises:
            MappingError: an array is missing, unknown, has another shape, or is not of floating-point numbers.
            UsageError: arrays that belong together differ in their dtypes.
        """
        from tpuconv.weight_map.on_devices import all_steps

        return all_steps(self.steps, self._arrays(tree), self.target.shardings)

    def lora(self, pairs: TreePairs, alpha: float) -> dict[str, Any]:
        """Returns the pairs of LoRA of the target's arrays, computed on the host. What is joined has the ranks of all.

        Args:
            pairs: by the name of the array that a pair changes, its two matrices, as Qwix has them; of released names
                as PEFT has them: A [r, in] and B [out, r].
            alpha: of the training: changes are scaled by alpha / r.

        Raises:
            MappingError: an array is not in the source, or is no matrix. They are named.
        """
        return mapped_pairs(self.source, self.target, pairs, alpha)

    def shardings(self, side: SideName, mesh: "Mesh") -> "dict[str, NamedSharding]":
        """Returns the sharding of each array of a side ("source" or "target") by its letters.

        Args:
            side: of the map.
            mesh: with axes of the names in `tpuconv.notation.sharding.AXES`.

        Raises:
            UsageError: there is no such side, or the mesh has other axes, over which nothing would be sharded.
        """
        if side not in get_args(SideName):
            raise UsageError(f"a map has no side {side!r}", hint='give "source" or "target"')
        return (self.source if side == "source" else self.target).shardings(mesh)

    def stream(
        self,
        tree: Any,
        out_shardings: "Mapping[str, Sharding] | None" = None,
        *,
        free: bool = True,
        deliver: "Callable[[str, jax.Array], Any] | None" = None,
    ) -> dict[str, Any]:
        """Returns what a call returns, made row by row, and layer by layer where layers are stacked, with one compiled
        program for all that are alike. Where both trees are sharded by the same letters each device rearranges its own
        part.

        Args:
            tree: as of a call; its arrays are on one mesh or one device.
            out_shardings: of each array of the target, on the devices of the source; by default `shardings` on the mesh
                of the source.
            free: delete each array of the source when it is not needed any more, so that there is memory for the next
                results.
            deliver: called with the name of each array of the target and the array. The result is returned in place of
                the array: `lambda name, x: jax.device_put(x, sampler[name], donate=True)` sends it to other devices.

        Raises:
            MappingError, UsageError: as of a call.
        """
        import jax
        import jax.numpy as jnp

        arrays = {name: jnp.asarray(x) for name, x in self._arrays(tree).items()}
        described = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)  # type: ignore[no-untyped-call]
            for name, x in arrays.items()
        }
        made: dict[str, jax.Array] = {}
        out: dict[str, Any] = {}
        for call in self.calls(described, out_shardings, free=free):
            for name, begun in call.begins.items():
                made[name] = jnp.zeros(begun.shape, begun.dtype, device=begun.sharding)
            stacked = [made.pop(name) for name in call.dst] if call.updates else []
            results = call.program([arrays[name] for name in call.src], stacked, np.int32(call.layer))
            made |= zip(call.dst, results, strict=True)
            if (
                not call.updates
            ):  # a program has its memory once it is started, and results of several would be too many
                jax.block_until_ready(results)  # type: ignore[no-untyped-call]
            for name in call.frees if free else ():
                if not (freed := arrays.pop(name)).is_deleted():
                    freed.delete()
            del results
            for name in call.done:
                result = made.pop(name)
                out[name] = deliver(name, result) if deliver else result
        return out

    def calls(
        self,
        described: "Mapping[str, jax.ShapeDtypeStruct]",
        out_shardings: "Mapping[str, Sharding] | None" = None,
        *,
        free: bool = True,
    ) -> "Iterator[Call]":
        """Yields the calls of `stream`, with compiled programs whose `memory_analysis()` tells what they take.

        Args:
            described: the shape, dtype and sharding of each array of the source, by name.
            out_shardings, free: as of `stream`.
        """
        import jax
        from jax.sharding import NamedSharding

        from tpuconv.weight_map.on_devices import calls

        first = next(iter(described.values())).sharding
        if out_shardings is None:
            on_mesh = isinstance(first, NamedSharding)
            shardings = self.shardings("target", first.mesh) if on_mesh else dict.fromkeys(self.target.shapes, first)
        else:
            shardings = dict(out_shardings)
            if missing := [name for name in self.target.shapes if name not in shardings]:
                raise UsageError(
                    f"out_shardings has no sharding of {', '.join(collapse(missing))}",
                    hint='give one of each array: `shardings("target", mesh)` returns all',
                )
        dtypes = {name: described[named.src[0]].dtype for named in self.steps for name in named.dst}
        wanted = {
            name: jax.ShapeDtypeStruct(shape, dtypes[name], sharding=shardings[name])  # type: ignore[no-untyped-call]
            for name, shape in self.target.shapes.items()
        }
        return calls(self.steps, described, wanted, free=free)

    def _arrays(self, tree: Any) -> dict[str, Any]:
        """Returns the arrays of the source by their full names."""
        form, shapes = self.source.form, self.source.shapes
        found = {name.removesuffix(LEAF): x for name, x in _flattened(tree)}
        wanted = {form.bare(name): name for name in shapes}
        names = found_names(found, wanted, form.target)
        arrays = {name: found[own] for name, own in names.items()}
        used = set(names.values())
        missing = [name for name in shapes if name not in arrays]
        unknown = [name for name in found if name not in used and not state_of(name)]
        wrong = [f"{name} {fault}" for name, x in arrays.items() if (fault := self._fault(name, x))]
        if missing or unknown or wrong:
            raise MappingError(
                f"the arrays differ from the tree {form.title}",
                details=shorten(
                    [f"missing: {pattern}" for pattern in collapse(missing)]
                    + [f"unknown: {pattern}" for pattern in collapse(unknown)]
                    + wrong
                ),
                hint="give the tree of this model, and say whether its layers are stacked: `scan_layers=`",
            )
        for named in self.steps:
            if len(dtypes := {str(arrays[name].dtype) for name in named.src}) > 1:
                raise UsageError(
                    f"{', '.join(collapse(named.src))} are mapped together and have the dtypes "
                    f"{', '.join(sorted(dtypes))}",
                    hint="cast them to one dtype",
                )
        return arrays

    def _fault(self, name: str, x: Any) -> str:
        """Says why an array of the source is not what the tree has; empty if it is."""
        import jax
        import jax.numpy as jnp

        if not isinstance(x, np.ndarray | jax.Array):
            return f"is a {type(x).__name__}, no array"
        if tuple(x.shape) != self.source.shapes[name]:
            return f"is {list(x.shape)} instead of {list(self.source.shapes[name])}"
        if name not in self.source.buffers and not jnp.issubdtype(x.dtype, jnp.floating):
            return f"is {x.dtype}: quantized values are not mapped"
        return ""


def make_map(model: MappedModel, source: TreeForm, target: TreeForm) -> WeightMap:
    """Returns the map between two trees of a model, of the parts that both have.

    Raises:
        UnsupportedConfig: a tree does not have the model, or the trees do not hold the same tensors.
    """
    for form in (source, target):
        model = model.with_parts(parts_in(model, form))
    forms = (form_in(model, form) for form in (source, target))
    return WeightMap(*(MappedTree(form, tree_rows(model, form)) for form in forms))


def _flattened(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a tree with their full names: the keys, numbers and attributes on the way, with dots."""
    import jax

    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield ".".join(map(_key, path)), leaf


def _key(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
