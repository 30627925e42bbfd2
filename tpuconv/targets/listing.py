"""Which families a target has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tpuconv.errors import TpuconvError, UsageError
from tpuconv.models.named import example_config
from tpuconv.models.registry import Family, all_families, family_names, get_family, named_family
from tpuconv.targets.registry import get_target, target_names
from tpuconv.targets.target import Target, Tree


@dataclass(frozen=True)
class Support:
    """A family, or one model_type of a family, that a target has.

    Attributes:
        name: of the family, or the model_type.
        models: the models that it has.
        scanned: whether the target has its layers scanned.
        parts: the encoders, with their projectors, that the target has of some of the models.
        notes: what a user must know to load it.
    """

    name: str
    models: str
    scanned: bool
    parts: tuple[str, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {
            "name": self.name,
            "models": self.models,
            "scanned": self.scanned,
            "parts": list(self.parts),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class TargetSupport:
    """A target, and what it has of one family.

    Attributes:
        target: its name.
        summary: one line about it.
        supported: whether the target has the family, or some models of it.
        scanned: whether it has the layers scanned.
        quantized: whether it has quantized parameters, of some form.
        parts: the encoders, with their projectors, that it has of some of the models.
        notes: what a user must know to load the output.
    """

    target: str
    summary: str
    supported: bool
    scanned: bool = False
    quantized: bool = False
    parts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def targets_of(family: Family) -> list[TargetSupport]:
    """Returns all targets, and what each has of a family."""
    found = []
    for name in target_names():
        try:
            found.append(_support_by(get_target(name), family))
        except UsageError as error:  # a broken package
            found.append(TargetSupport(name, "", supported=False, notes=(error.message,)))
    return found


def _support_by(target: Target, family: Family) -> TargetSupport:
    is_quantized = target.quantized is not None
    if target.trees is None:
        ours = _as_ours(target, family)
        return TargetSupport(target.name, target.summary, True, ours.scanned, is_quantized, ours.parts, ours.notes)
    found = []
    for model_type in dict.fromkeys(family.architectures.values()):
        name, text_type = family.in_targets(model_type)
        trees = target.trees.get(text_type, target.trees.get(name, ()))
        found += [tree for tree in (trees if isinstance(trees, tuple) else (trees,)) if tree not in found]
    scanned, parts, notes = _facts_of(target, found)
    return TargetSupport(target.name, target.summary, bool(found), scanned, is_quantized and bool(found), parts, notes)


def _facts_of(target: Target, trees: Sequence[Tree]) -> tuple[bool, tuple[str, ...], tuple[str, ...]]:
    """Returns if layers are scanned in one of some trees, and their parts and notes, each once."""
    scanned = target.layer_axis is not None and any(layers.stacked for tree in trees for layers in tree.layers)
    parts = tuple(dict.fromkeys(part for tree in trees for part in tree.parts))
    return scanned, parts, tuple(dict.fromkeys(tree.note for tree in trees if tree.note))


def supported(target: Target, family: str | None = None) -> list[Support]:
    """Returns what a target has, of one family if it is named.

    Raises:
        UsageError: there is no such family, or the target does not have it.
    """
    if target.trees is None:
        names = [named_family(family).name] if family else family_names()
        return [_as_ours(target, get_family(name)) for name in names]
    types = named_family(family).architectures.values() if family else ()
    found = []
    for name, trees in target.trees.items():
        if family is None or name == family or name in types:
            several = trees if isinstance(trees, tuple) else (trees,)
            found.append(Support(name, _models(name), *_facts_of(target, several)))
    if not found:
        raise UsageError(
            f"the target {target.name} has no table for {family}", hint=f"it has {', '.join(target.trees)}"
        )
    return found


def _as_ours(target: Target, family: Family) -> Support:
    """Returns what a target has of a family if it has our own tree, or the tensors of the release."""
    parts = tuple(dict.fromkeys(each.part for each in family.modalities))
    if target.layer_axis is None:
        return Support(family.name, family.summary, False, parts, ())
    why = _unscannable(family)
    notes = (f"with default sizes layers cannot be scanned: {why}",) if why else ()
    return Support(family.name, family.summary, not why, parts, notes)


def _unscannable(family: Family) -> str:
    """Returns why the layers of a model with default sizes cannot be scanned; empty if they can, or if the family has
    no default sizes."""
    try:
        return str(getattr(family.config.from_hf(example_config(family)), "unscannable", ""))
    except TpuconvError:
        return ""


def _models(name: str) -> str:
    """Returns the models of a family, or whose a model_type is."""
    if name in family_names():
        return get_family(name).summary
    owners = [family.name for family in all_families() if name in family.architectures.values()]
    return f"model_type {name}" + (f" of {owners[0]}" if owners else "")
