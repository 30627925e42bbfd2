"""Chooses the tree of a model in a target, and checks what the target has of the model."""

import re
from collections.abc import Callable, Collection, Iterable
from typing import Any

from tpuconv.errors import UnsupportedConfig
from tpuconv.names import collapse
from tpuconv.targets.needs import Needs
from tpuconv.targets.target import Target, Tree

_NUMBERED_LAYER = re.compile(r"layers\.\d+\.")


def find_tree(target: Target, family: str, model_type: str, config: Any) -> Tree:
    """Returns the tree of a model.

    Raises:
        UnsupportedConfig: the target does not have the family, or not with this config.
    """
    trees = _trees(target, family, model_type)
    for tree in trees:
        if not tree.when(config):
            continue
        if unmet := _unmet(tree.needs, config):
            raise UnsupportedConfig(
                f"the target {target.name} has {family} only with {unmet}", hint="convert without `target=`"
            )
        return tree
    assert target.trees is not None
    raise UnsupportedConfig(
        f"the target {target.name} has no table for {family}" + (" with this config.json" if trees else ""),
        hint=f"it has {', '.join(target.trees)}; `tpuconv families --target {target.name}` lists them",
    )


def differences(target: Target, family: str, model_type: str, config: Any) -> str:
    """Says what a program computes otherwise than transformers of a model that it loads; empty if it is nothing.

    Raises:
        UnsupportedConfig: see `find_tree`.
    """
    if target.trees is None:
        return ""
    unmet = _unmet(find_tree(target, family, model_type, config).differs, config)
    return f"{target.name} computes the logits of {family} only with {unmet}: its logits will differ" if unmet else ""


def check_stacked(target: Target, tree: Tree, family: str, config: Any) -> None:
    """Checks that a target has the layers of a model stacked.

    Raises:
        UnsupportedConfig: it does not.
    """
    if any(layers.stacked == "" for layers in tree.layers):
        raise UnsupportedConfig(f"{target.name} has no stacked layers of this model", hint="leave out `scan_layers=`")
    if unmet := _unmet(tree.stacked_needs, config):
        raise UnsupportedConfig(
            f"the target {target.name} has stacked layers of {family} only with {unmet}",
            hint="leave out `scan_layers=`",
        )


def placed_parts(
    target: Target, family: str, model_type: str, parts: Collection[str], read: Callable[[Collection[str]], Any]
) -> tuple[str, ...]:
    """Returns the parts beside the text model that a target has.

    Args:
        target: what the output is for.
        family, model_type: as of `target_table`.
        parts: of the model.
        read: returns the config of the model with some of its parts.

    Raises:
        UnsupportedConfig: see `find_tree` and `read`.
    """
    if target.trees is None:
        return () if target.is_safetensors else tuple(parts)
    some = [part for part in parts if any(part in tree.parts for tree in _trees(target, family, model_type))]
    if not some:
        return ()
    config = read(some)
    have = find_tree(target, family, model_type, config).parts
    return tuple(part for part in some if part in have and have[part].when(config.parts[part]))


def check_quantized(target: Target, tree: Tree, parameters: Iterable[str], quantized: Collection[str]) -> None:
    """Checks that a program reads parameters as the rules of a quantization leave them.

    Args:
        target: of the program.
        tree: of the model.
        parameters: our names of all parameters.
        quantized: those that are quantized.

    Raises:
        UnsupportedConfig: the program reads one only as it is, or only quantized together with one that is not.
    """
    if tree.quantized is None:
        return
    known: dict[str, list[str]] = {}
    for name in parameters:
        known.setdefault(_NUMBERED_LAYER.sub("", name, count=1), []).append(name)
    together = [[name for part in parts for name in known.get(part, ())] for parts in tree.quantized]
    chosen = set(quantized)
    read_so = {name for names in together for name in names}
    if never := [name for name in quantized if name not in read_so]:
        raise UnsupportedConfig(
            f"the program of {target.name} does not read {', '.join(collapse(never))} quantized",
            hint="leave them out of the rules",
        )
    for names in together:
        left = [name for name in names if name not in chosen]
        if 0 < len(left) < len(names):
            raise UnsupportedConfig(
                f"the rules quantize only some of what {target.name} reads quantized all together or not at all",
                details=[f"not quantized: {pattern}" for pattern in collapse(left)],
                hint="add these to the rules, or leave the others out",
            )


def _unmet(needs: Needs, config: Any) -> str:
    """Returns the needs that do not hold for a config, as one text."""
    return " and ".join(text for text, holds in needs.items() if not holds(config))


def _trees(target: Target, family: str, model_type: str) -> tuple[Tree, ...]:
    """Returns the trees of a model, of which each belongs to some configs."""
    assert target.trees is not None
    trees = target.trees.get(model_type, target.trees.get(family, ()))
    return trees if isinstance(trees, tuple) else (trees,)
