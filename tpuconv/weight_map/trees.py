"""The trees of a weight map: for each tree the rows from released tensors to its arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tpuconv.errors import UsageError
from tpuconv.notation.layout import Layout, Shape, format_axes
from tpuconv.notation.sharding import MESH_AXES, letter_sizes
from tpuconv.notation.stand_ins import stand_ins
from tpuconv.notation.table import Binding, Map, Stack
from tpuconv.targets.compose import target_table
from tpuconv.targets.registry import get_target, target_names
from tpuconv.targets.target import Target
from tpuconv.targets.trees import placed_parts
from tpuconv.weight_map.model import MappedModel
from tpuconv.weight_map.vllm import joined

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding

VLLM = "vllm"


@dataclass(frozen=True)
class TreeForm:
    """One of the two trees of a map.

    Attributes:
        name: of a target, or `vllm`.
        scan_layers: whether layers are stacked.
        tensor_parallel: into how many shards vLLM's joined matrices are divided.
    """

    name: str
    scan_layers: bool = False
    tensor_parallel: int = 1

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {"tree": self.name, "scan_layers": self.scan_layers, "tensor_parallel": self.tensor_parallel}

    @property
    def title(self) -> str:
        """The tree and its form, for messages."""
        shards = f" in {self.tensor_parallel} shards" if self.tensor_parallel > 1 else ""
        return self.name + (" with scanned layers" if self.scan_layers else "") + shards

    @property
    def target(self) -> Target | None:
        """The target that has the tree; None if it has the names of a release."""
        target = None if self.name == VLLM else get_target(self.name)
        return None if target is None or target.is_safetensors else target

    @property
    def has_released_names(self) -> bool:
        """True if the tree has the tensors of a release, and no parameters of a program."""
        return self.name != VLLM and self.target is None

    def bare(self, name: str) -> str:
        """Returns the name of an array without what stands before and behind all names of the tree."""
        target = self.target
        return name if target is None else name.removeprefix(target.root).removesuffix(target.leaf)


def form_of(name: str, *, scan_layers: bool, tensor_parallel: int) -> TreeForm:
    """Returns the form of a tree in a map. Trees without stacked layers ignore `scan_layers`, trees other than vLLM's
    ignore `tensor_parallel`.

    Raises:
        UsageError: there is no such tree.
    """
    known = [*target_names(), VLLM]
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise UsageError(
            f"there is no tree '{name}'",
            hint=f"known are {', '.join(known)}" + (f"; the nearest is {near[0]}" if near else ""),
        )
    target = TreeForm(name).target
    scans = scan_layers and target is not None and target.layer_axis is not None
    return TreeForm(name, scans, tensor_parallel if name == VLLM else 1)


def form_in(model: MappedModel, form: TreeForm) -> TreeForm:
    """Returns the form that a tree has of a model: layers that do not repeat with a period stay apart in ours."""
    is_ours = form.target is not None and form.target.trees is None
    return replace(form, scan_layers=False) if is_ours and model.config.unscannable else form


def parts_in(model: MappedModel, form: TreeForm) -> tuple[str, ...]:
    """Returns the parts beside the text model that a tree has.

    Raises:
        UnsupportedConfig: the tree does not have the model.
    """
    if form.name == VLLM:
        return ()
    if form.target is None:
        return model.parts
    return placed_parts(form.target, *model.in_targets, model.parts, model.config_with)


def tree_rows(model: MappedModel, form: TreeForm) -> Sequence[Binding]:
    """Returns the rows from released tensors to the arrays of a tree. Arrays that no layer reads are made of the
    tensors that stand for theirs, which no other tree has.

    Raises:
        UnsupportedConfig: the tree does not have the model or its layers stacked.
    """
    table, config = model.released(model.config), model.config
    if form.target is not None:
        in_tree, with_letters = target_table(
            form.target,
            *model.in_targets,
            table,
            config,
            scan_layers=form.scan_layers,
            include_mtp=model.include_mtp,
        )
        others = stand_ins(in_tree, with_letters)
        return [_standing_in(row, others) for row in in_tree.bind(with_letters, model.include_mtp)]
    released = _released(table.bind(config, model.include_mtp))
    return joined(released, form.tensor_parallel) if form.name == VLLM else released


def _standing_in(binding: Binding, others: Mapping[str, str]) -> Binding:
    if not binding.row.otherwise:
        return binding
    return replace(binding, src=tuple(Stack(tuple(others[n] for n in x.names), x.depth) for x in binding.src))


def _released(bindings: Sequence[Binding]) -> list[Binding]:
    """Returns the rows of the tree that a release has: each tensor is itself."""
    rows: dict[str, Binding] = {}
    for binding in bindings:
        for stack, axes in zip(binding.src, binding.layout.src, strict=True):
            layout = Layout((axes[stack.depth :],), (axes[stack.depth :],))
            for name in stack.names:
                itself = (Stack((name,), 0),)
                row = Map(name, name, str(layout), buffer=binding.row.buffer, part=binding.row.part)
                rows[name] = Binding(row, layout, binding.sizes, itself, itself)
    return list(rows.values())


@dataclass(frozen=True)
class MappedTree:
    """One of the two trees of a map.

    Attributes:
        form: which tree it is.
        rows: from released tensors to its arrays.
    """

    form: TreeForm
    rows: Sequence[Binding]

    @cached_property
    def buffers(self) -> set[str]:
        """The names of the arrays that are not trained, and may hold whole numbers."""
        return {name for row in self.rows if row.row.buffer for name in row.dst_shapes()}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """The shape of each array, by name."""
        return {name: shape for row in self.rows for name, shape in row.dst_shapes().items()}

    @cached_property
    def axes(self) -> dict[str, str]:
        """The axes of each array in letters, by name: `D N H`."""
        return {name: axes for row in self.rows for name, axes in row.dst_axes().items()}

    def shardings(self, mesh: "Mesh") -> "dict[str, NamedSharding]":
        """Returns the sharding of each array by its letters (`tpuconv.notation.sharding`). A letter is divided between
        its elements, never within one: a head stays whole, and so do the rows of a concatenation. On a mesh with other
        axes UsageError is raised."""
        from tpuconv.models.common.placement import check_axes, sharding

        check_axes(mesh)
        return {
            stack.names[0]: sharding(format_axes(axes), letter_sizes(axes, row.sizes), mesh, MESH_AXES)
            for row in self.rows
            for axes, stack in zip(row.layout.dst, row.dst, strict=True)
        }
