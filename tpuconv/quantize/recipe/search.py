"""A recipe of mixed types: for every group of parameters an option, so that the model loses least at a number of bits
per weight.

    summary: 4.96 bits a weight, chosen by measured sensitivity
    qwix:
      rules:
        - {module_path: 'layers/(0|4)/attn/.*', weight_qtype: int8}
        - {module_path: 'layers/\\d+/mlp/.*', weight_qtype: int4, tile_size: 32}

What each group costs is measured by `tpuconv.quantize.recipe.layerwise`. Here are only numbers and names.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np

from tpuconv.errors import UsageError
from tpuconv.quantize.calibration_settings import Calibration
from tpuconv.text import plain

STATES = 20_000
"""Pairs of sums that the search keeps at most."""


@dataclass(frozen=True)
class Option:
    """One way to store a group: unquantized if `qtype` is None.

    Attributes:
        bits: of all its weights together, with scales.
        kl: what it costs the model, in nats per token; NaN before it is measured.
        tile_axes, method: as of a rule, its `weight_calibration_method`.
    """

    qtype: str | None
    tile_size: int | None
    bits: int
    kl: float = nan
    tile_axes: str = "last"
    method: str = "absmax"

    def __str__(self) -> str:
        return (self.qtype or "as it is") + (f"/{self.tile_size}" if self.tile_size else "")


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that get the same rule.

    Attributes:
        path: pattern of their modules, with {} for the number of the layer.
        layer: that number; None outside of layers.
        names: of the parameters.
        count: number of weights.
        options: the first leaves the group unquantized.
    """

    path: str
    layer: int | None
    names: tuple[str, ...]
    count: int
    options: tuple[Option, ...]

    @property
    def pattern(self) -> str:
        """The pattern of its modules."""
        return self.path.format(self.layer)

    @property
    def worst(self) -> float:
        """The largest cost of an option."""
        return max(option.kl for option in self.options)

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        keys = ("qtype", "tile_size", "bits", "kl")
        options = ((o.qtype, o.tile_size, o.bits / self.count, o.kl) for o in self.options)
        return {
            "group": self.pattern,
            "parameters": self.count,
            "options": [dict(zip(keys, values, strict=True)) for values in options],
        }


@dataclass(frozen=True)
class SearchSpace:
    """The groups to choose options for. `parameters` counts all weights; `other_bits` are the bits of those in no
    group."""

    groups: tuple[ParamGroup, ...]
    parameters: int
    other_bits: int

    def bits(self, options: Sequence[Option]) -> float:
        """Mean bits per weight with these options, as in the report of a quantized checkpoint."""
        return (self.other_bits + sum(option.bits for option in options)) / self.parameters

    def check(self, target: float) -> None:
        """Checks that some choice, but not every choice, has at most `target` bits per weight.

        Raises:
            UsageError: it is not so. The message has the range.
        """
        least = self.bits([min(group.options, key=lambda option: option.bits) for group in self.groups])
        unquantized = self.bits([group.options[0] for group in self.groups])
        if not least <= target < unquantized:
            raise UsageError(
                f"{target:g} bits a weight cannot be reached: this model can have {least:.4f} to {unquantized:.4f}",
                hint=f"all groups in their smallest type have {least:.4f} bits a weight, unquantized {unquantized:g}",
            )


@dataclass(frozen=True)
class Sums:
    """The choices of which none is better in bits and in KL: of each the bits in all and the sum of KL, ascending by
    bits; and for each group which sums were kept, of how many."""

    bits: np.ndarray
    kl: np.ndarray
    steps: Sequence[tuple[np.ndarray, int]]

    def options(self, space: SearchSpace, number: int) -> list[Option]:
        """Returns the option of each group in the choice of this number."""
        chosen = []
        for group, (kept, count) in zip(reversed(space.groups), reversed(self.steps), strict=True):
            option, number = divmod(int(kept[number]), count)
            chosen.append(group.options[option])
        return chosen[::-1]


def best_sums(space: SearchSpace) -> Sums:
    """Returns the Pareto front of all choices, by bits and the sum of KL.

    This assumes that divergences add up, which they nearly do: measure the complete model afterwards. Then it is a
    knapsack with one item per group, solved exactly (Nemhauser and Ullmann, 1969): group by group, every pair of sums,
    bits and KL, is kept unless another one is better in both. If there are more than `STATES`, in models of many
    layers, only as many are kept, evenly by bits; the result may then be worse by what the bits between two of them are
    worth. Which are kept does not depend on the target, so that a larger target never has a larger KL.
    """
    bits, kl = np.array([space.other_bits]), np.zeros(1)
    steps: list[tuple[np.ndarray, int]] = []
    for group in space.groups:
        all_bits = np.concatenate([bits + option.bits for option in group.options])
        all_kl = np.concatenate([kl + option.kl for option in group.options])
        order = np.lexsort((all_kl, all_bits))
        least = np.minimum.accumulate(all_kl[order])
        kept = order[least < np.concatenate([[inf], least[:-1]])]
        if len(kept) > STATES:
            sums = all_bits[kept]
            slots = (sums - sums[0]) * STATES // (sums[-1] - sums[0] + 1)
            kept = kept[np.diff(slots, prepend=-1) > 0]  # the least bits of each slot
        steps.append((kept, len(bits)))
        bits, kl = all_bits[kept], all_kl[kept]
    return Sums(bits, kl, steps)


def choose(space: SearchSpace, target: float) -> list[Option]:
    """Returns the option of each group with the lowest sum of KL at `target` bits per weight or less; see `best_sums`.

    Raises:
        UsageError: see `SearchSpace.check`.
    """
    space.check(target)
    sums = best_sums(space)
    return sums.options(space, int(np.searchsorted(sums.bits / space.parameters, target, side="right")) - 1)


# -- as a file --------------------------------------------------------------------------------------------------------


def rules(groups: Sequence[ParamGroup], options: Sequence[Option]) -> list[str]:
    """Returns the rules in YAML: one for all layers whose modules of a path get the same option."""
    layers: dict[tuple[str, Option], list[int | None]] = {}
    for group, option in zip(groups, options, strict=True):
        if option.qtype:
            kind = Option(option.qtype, option.tile_size, 0, 0, option.tile_axes, option.method)
            layers.setdefault((group.path, kind), []).append(group.layer)
    out = []
    for (path, kind), members in layers.items():
        all_layers = [group.layer for group in groups if group.path == path]
        is_for_all = members == all_layers and len(members) > 1 and not _matches_others(path, groups)
        numbers = r"\d+" if is_for_all else "|".join(map(str, members))
        pattern = path.format(f"({numbers})" if "|" in numbers else numbers)
        tile = f", tile_size: {kind.tile_size}" if kind.tile_size else ""
        tile += f", tile_axes: {kind.tile_axes}" if kind.tile_axes != "last" else ""
        tile += f", weight_calibration_method: {kind.method}" if kind.method != "absmax" else ""
        out.append(f"- {{module_path: '{pattern}', weight_qtype: {kind.qtype}{tile}}}")
    return out


def _matches_others(path: str, groups: Sequence[ParamGroup]) -> bool:
    """Returns True if the pattern of a path matches modules of other groups: layers that lack the path may have
    them."""
    others = (name for group in groups if group.path != path for name in group.names)
    modules = {"/".join(name.split(".")[:-1]) for name in others}
    pattern = re.compile(path.format(r"\d+"))
    return any(pattern.fullmatch(module) for module in modules)


def to_yaml(
    space: SearchSpace,
    options: Sequence[Option],
    provenance: Sequence[str],
    gates: Mapping[str, float] | None = None,
    calibration: Calibration | None = None,
) -> str:
    """Returns a config with these options. Its comments are the lines of `provenance`, and a table of what was
    measured.

    Args:
        space, options: the groups, and what was chosen for each.
        provenance: lines of text.
        gates: of the config; None for what roundings of its types change.
        calibration: its calibration, if it has one.
    """
    lines = [f"summary: {space.bits(options):.2f} bits a weight, chosen by measured sensitivity"]
    # A name from elsewhere may hold what breaks a comment.
    lines += [f"# {plain(line)}" for line in provenance]
    lines += ["#", *(f"#   {plain(line)}" for line in _table_lines(space.groups, options))]
    lines += ["qwix:", "  rules:", *(f"    {rule}" for rule in rules(space.groups, options))]
    if calibration is not None:
        lines.append(f"calibration: {calibration.to_yaml()}")
    if gates is not None:
        lines.append(f"gates: {{{', '.join(f'{name}: {gate:g}' for name, gate in gates.items())}}}")
    return "\n".join([*lines, ""])


def _table_lines(groups: Sequence[ParamGroup], options: Sequence[Option]) -> Iterator[str]:
    width = max(len(group.pattern) for group in groups)
    yield f"{'group':{width}}  {'weights':>14}  {'chosen':>8}  KL of each type, nats a token"
    for group, chosen in sorted(zip(groups, options, strict=True), key=lambda pair: -pair[0].worst):
        costs = "  ".join(f"{option} {option.kl:.2e}" for option in group.options[1:])
        yield f"{group.pattern:{width}}  {group.count:14,}  {chosen!s:>8}  {costs}"
