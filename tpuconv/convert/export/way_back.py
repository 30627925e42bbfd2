"""The way back of a trainer's checkpoint: finds the target whose table explains the arrays of an Orbax tree.

A tree may have its parameters below other names (`params` of a train state), with or without the leaf `value` of Flax
NNX, and the state of an optimizer beside them. Everything else must be a parameter of the table.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, product
from typing import Any

from tpuconv.checkpoint.orbax_tree import TrainedTree, TreeArray
from tpuconv.convert.plan.types import FLOAT_DTYPES, Skip
from tpuconv.errors import ConfigError, MappingError, UnsupportedConfig, UsageError, shorten
from tpuconv.models.common.config import DecoderConfig
from tpuconv.models.registry import Family
from tpuconv.names import LEAF, OWN_TARGET, collapse
from tpuconv.notation.layout import Axis, Shape, parse_axes
from tpuconv.notation.pairs import PAIR_ENDS
from tpuconv.notation.sizes import HasSizes
from tpuconv.notation.table import MTP_PARAMETERS, MappingTable
from tpuconv.sources.headers import CODES
from tpuconv.targets.compose import target_table
from tpuconv.targets.registry import all_targets, get_target
from tpuconv.targets.target import Target
from tpuconv.text import format_count

TRAINING_STATES = {
    **dict.fromkeys(("opt_state", "opt_states", "optimizer", "optimizer_state"), "arrays of an optimizer's state"),
    **dict.fromkeys(("step", "steps"), "arrays with the number of a step"),
    **dict.fromkeys(("rng", "rngs"), "arrays of the state of random numbers"),
}
"""The values that a trainer saves beside the parameters, by a part of the name."""

VOCABULARY = Axis("V")


@dataclass(frozen=True)
class SavedForm:
    """A form that the tree of a model may have.

    Attributes:
        target: whose tree it is.
        scan_layers, include_mtp: the form of the table.
        table: from released tensors to the arrays.
        config: the family's, with the letters of the table.
    """

    target: Target
    scan_layers: bool
    include_mtp: bool
    table: MappingTable
    config: HasSizes

    def __str__(self) -> str:
        return self.target.name + (" with scanned layers" if self.scan_layers else "")

    def parameters(self) -> dict[str, str]:
        """The parameters of the table, by their names without the root and the leaf of the target."""
        return {
            name.removeprefix(self.target.root).removesuffix(self.target.leaf): name
            for binding in self.table.bind(self.config, self.include_mtp)
            for name in binding.dst_shapes()
        }


@dataclass(frozen=True)
class Explained:
    """The arrays of a tree as parameters of a target.

    Attributes:
        form: that explains them.
        names: the name in the tree of each parameter of the table.
        missing: parameters that the tree lacks.
        unknown: arrays that are neither parameters nor states.
        skipped: what is not exported.
    """

    form: SavedForm
    names: Mapping[str, str]
    missing: Sequence[str]
    unknown: Sequence[str]
    skipped: tuple[Skip, ...]


@dataclass(frozen=True)
class Parameter:
    """An array of the table: `shape` is the shape by the model's config, `stored` the shape in the tree."""

    name: str
    shape: Shape
    axes: str
    sources: tuple[str, ...]
    buffer: bool
    stored: TreeArray


Reading = tuple[MappingTable, DecoderConfig]
"""A table of a family, with the names of a release, and the family's reading of config.json."""


def readings(family: Family, raw: Mapping[str, Any], tensors: Collection[str], returns: str) -> list[Reading]:
    """Returns the readings of a model: the text model alone, then with each choice of the parts beside it that
    config.json describes.

    Args:
        family: of the model.
        raw: the parsed config.json.
        tensors: names of the tensors of the release.
        returns: what the model returns.

    Raises:
        UnsupportedConfig, ConfigError: the text model is not read. A part that is not read is left out.
    """
    parts = [each.part for each in family.modalities]
    found: list[Reading] = []
    for some in chain.from_iterable(combinations(parts, count) for count in range(len(parts) + 1)):
        try:
            config = family.read_config(raw, tensors=tensors, returns=returns, parts=some)
        except (UnsupportedConfig, ConfigError):
            if not some:
                raise
            continue
        found.append((family.table_for(tensors, config, returns), config))
    return found


def explain_tree(
    tree: TrainedTree,
    family: Family,
    model_type: str,
    readings: Sequence[Reading],
    target: str | None,
    *,
    merged: bool = False,
) -> Explained:
    """Returns how a target's table explains a tree.

    Args:
        tree: what was saved.
        family, model_type: of config.json.
        readings: of the model.
        target: whose tree it is; None: of each target in turn.
        merged: whether arrays of LoRA are added to the parameters.

    Raises:
        UnsupportedConfig: the target does not have the model.
        MappingError: a parameter is missing, or an array is not explained. They are named.
        UsageError: there is no such target, or it has no arrays.
    """
    forms = tree_forms(tree.names, family, model_type, readings, target)
    pairs = {name for name in tree.names if is_of_pair(name)}
    found = [_explained(tree.names - pairs if merged else tree.names, form) for form in forms]
    # By patterns: of a config with another number of layers most arrays are missing, and yet only that is wrong.
    best = min(found, key=lambda form: (len(collapse(form.missing)) + len(collapse(form.unknown)), len(form.missing)))
    if not best.names:
        raise MappingError(
            f"no array of {tree.folder} has the name of a parameter of {family.name}"
            + (f" as {target} has it" if target else ", as any target has it"),
            details=shorten(list(collapse(sorted(tree.names)))),
            hint=_no_model(merged)
            if pairs
            else "give the config of the model that was trained" + (", or leave out `target=`" if target else ""),
        )
    if best.missing or best.unknown:
        lines = [f"{name}: missing" for name in collapse(best.missing)]
        lines += [f"{name}: not a parameter of the model, and no known state" for name in collapse(best.unknown)]
        raise MappingError(
            f"{tree.folder} is not a checkpoint of this {family.name}: in the form of {best.form} it has "
            f"{format_count(len(best.missing), 'missing array')} and {format_count(len(best.unknown), 'unknown one')}",
            details=shorten(lines),
            hint=_no_model(merged)
            if pairs and (best.missing or pairs.issuperset(best.unknown))
            else "give the config of the model that was trained; arrays that do not belong to the model must not be "
            "in the tree",
        )
    return best


def is_of_pair(name: str) -> bool:
    """Returns True if an array is one of the two of LoRA."""
    return name.removesuffix(LEAF).endswith(PAIR_ENDS)


def _no_model(merged: bool) -> str:
    if merged:
        return (
            "the tree has LoRA without the model, or the model is quantized: write the adapter with `adapter=True`, "
            "and merge it into the release: `tpuconv convert SRC OUT --target huggingface --adapter ADAPTER`"
        )
    return (
        "the tree has LoRA: `tpuconv export` writes it as an adapter with `adapter=True`, and merges it into the model "
        "with `merge=True`"
    )


def parameters_of(tree: TrainedTree, explained: Explained) -> tuple[list[Parameter], tuple[Skip, ...]]:
    """Opens the arrays. Returns them, and the parts that are left out: rows beyond the vocabulary of the model.

    Raises:
        MappingError: an array has another shape, or a dtype that cannot be exported. They are named.
        SourceError: an array cannot be read.
    """
    stored = tree.open(explained.names.values())
    found: list[Parameter] = []
    faults, padded = [], []
    form = explained.form
    for binding in form.table.bind(form.config, form.include_mtp):
        axes, shapes = binding.dst_axes(), binding.dst_shapes()
        sources = tuple(name for stack in binding.src for name in stack.names)
        dtypes = {stored[explained.names[name]].dtype for name in shapes}
        known = CODES if binding.row.buffer else FLOAT_DTYPES  # others are quantized, and their scales unknown
        for name, shape in shapes.items():
            array = stored[explained.names[name]]
            if array.dtype not in known or len(dtypes) > 1:
                why = f"with {', '.join(sorted(dtypes))} in one tensor of the release" if len(dtypes) > 1 else ""
                faults.append(f"{array.name}: cannot be exported, of dtype {array.dtype} {why}".rstrip())
            elif array.shape != shape and not _is_padded(array.shape, shape, axes[name]):
                faults.append(f"{array.name}: {list(array.shape)} instead of {list(shape)}")
            elif array.shape != shape:
                rows = max(n - m for n, m in zip(array.shape, shape, strict=True))
                padded.append(Skip(array.name, rows, "rows of padding after the vocabulary"))
            found.append(Parameter(name, shape, axes[name], sources, binding.row.buffer, array))
    if faults:
        raise MappingError(
            f"{tree.folder} does not match the config in {format_count(len(faults), 'array')}",
            details=shorten(faults),
            hint="give the config of the model that was trained, and a checkpoint whose weights are floats",
        )
    return found, tuple(padded)


def _targets(names: Collection[str], name: str | None) -> list[Target]:
    """Returns the targets to try: first those whose names end as most of the tree's do."""
    if name is not None:
        target = get_target(name)
        if target.is_safetensors:
            raise UsageError(f"the target {name} has no arrays of Orbax", hint="leave out `target=`")
        return [target]
    leaf = LEAF if 2 * sum(array.endswith(LEAF) for array in names) > len(names) else ""
    targets = [target for target in all_targets() if not target.is_safetensors]
    return sorted(targets, key=lambda target: (target.leaf != leaf, target.name != OWN_TARGET))


def tree_forms(
    names: Collection[str], family: Family, model_type: str, readings: Sequence[Reading], target: str | None
) -> Iterator[SavedForm]:
    """Yields the forms that the tree of a model with arrays of these names may have; see `explain_tree`."""
    for each in _targets(names, target):
        try:
            yield from _forms(names, each, family, model_type, readings)
        except UnsupportedConfig:
            if target is not None:
                raise


def _forms(
    names: Collection[str], target: Target, family: Family, model_type: str, readings: Sequence[Reading]
) -> Iterator[SavedForm]:
    has_mtp = any(MTP_PARAMETERS in name for name in names)
    scans = (False, True) if target.layer_axis is not None else (False,)
    name, kind = family.in_targets(model_type)
    refused: UnsupportedConfig | None = None
    count = 0
    for (table, config), scan, mtp in product(readings, scans, (False, True) if has_mtp else (False,)):
        try:
            own = target_table(target, name, kind, table, config, scan_layers=scan, include_mtp=mtp)
        except UnsupportedConfig as error:
            refused = refused or error
            continue
        count += 1
        yield SavedForm(target, scan, mtp, *own)
    if refused and not count:
        raise refused


def _explained(arrays: Collection[str], form: SavedForm) -> Explained:
    wanted = form.parameters()
    found = {name.removesuffix(LEAF): name for name in arrays}
    names = {name: found[own] for name, own in found_names(found, wanted, form.target).items()}
    unknown, skipped = without_states(set(arrays) - set(names.values()))
    missing = [name for name in wanted.values() if name not in names]
    return Explained(form, names, missing, unknown, skipped)


def without_states(names: Collection[str]) -> tuple[list[str], tuple[Skip, ...]]:
    """Returns the arrays that are no states of a trainer, sorted, and the states."""
    states: dict[str, list[str]] = {}
    others = []
    for name in sorted(names):
        if reason := state_of(name):
            states.setdefault(reason, []).append(name)
        else:
            others.append(name)
    skipped = tuple(
        Skip(pattern, len(members), reason)
        for reason, own in states.items()
        for pattern, members in collapse(own).items()
    )
    return others, skipped


def found_names(found: Collection[str], wanted: Mapping[str, str], target: Target | None) -> dict[str, str]:
    """Returns the names in a tree of the parameters that it has.

    Args:
        found: the names in the tree, without the leaf.
        wanted: the full names of the parameters, by the names without the target's root and leaf.
        target: whose tree it is; None if it has the names of a release.
    """
    front = front_of(found, wanted)
    fronts = [front, *(target.fronts_beside(front) if target else ())]
    names = {name: [front + key for front in fronts if front + key in found] for key, name in wanted.items()}
    return {name: own[0] for name, own in names.items() if own}


def front_of(found: Collection[str], wanted: Collection[str]) -> str:
    """Returns the prefix of the names of parameters in a tree: the prefix of most names, without states."""
    counts: Counter[str] = Counter()
    for name in found:
        parts = name.split(".")
        for i in range(len(parts) if not state_of(name) else 0):
            if ".".join(parts[i:]) in wanted:
                counts["".join(f"{part}." for part in parts[:i])] += 1
    return max(counts, key=lambda front: (counts[front], -len(front)), default="")


def state_of(name: str) -> str:
    """Describes a trainer's array that is not a parameter, by its name; empty if it may be a parameter."""
    return next((TRAINING_STATES[part] for part in name.split(".") if part in TRAINING_STATES), "")


def _is_padded(stored: Shape, shape: Shape, axes: str) -> bool:
    """Returns True if an array only has more rows of the vocabulary."""
    own = parse_axes(axes)
    return len(stored) == len(shape) and all(
        n == m or (n > m and axis == VOCABULARY) for n, m, axis in zip(stored, shape, own, strict=True)
    )
