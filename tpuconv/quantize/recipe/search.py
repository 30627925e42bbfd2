"""A recipe of mixed types: of every group of parameters the one that together lose least, at a number of bits a weight.

    summary: 4.96 bits a weight, chosen by measured sensitivity
    qwix:
      rules:
        - {module_path: 'layers/(0|4)/attn/.*', weight_qtype: int8}
        - {module_path: 'layers/\\d+/mlp/.*', weight_qtype: int4, tile_size: 32}

What a group loses by itself is measured (`tpuconv.quantize.recipe.measure`); here are only numbers and names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import numpy as np

from tpuconv.errors import OutputError, ResourceError, UsageError
from tpuconv.quantize.config import Rule, default_gates
from tpuconv.storage.disk import replace_file
from tpuconv.text import plain

STATES = 20_000
"""Pairs of sums that the search keeps at most."""


@dataclass(frozen=True)
class Option:
    """One way to store a group, as it is where `qtype` is None. `bits` are those of all its weights together, scales
    counted; `kl` is what it costs the model, in nats a token, NaN before it is measured."""

    qtype: str | None
    tile_size: int | None
    bits: int
    kl: float = nan

    def __str__(self) -> str:
        return (self.qtype or "as it is") + (f"/{self.tile_size}" if self.tile_size else "")


@dataclass(frozen=True)
class Group:
    """Parameters that get one rule: `names`, of `count` weights in all. `path` is the pattern of their modules, with {}
    for the number of the layer; `layer` is that, None outside of layers. The first option leaves the group as it is."""

    path: str
    layer: int | None
    names: tuple[str, ...]
    count: int
    options: tuple[Option, ...]

    @property
    def pattern(self) -> str:
        return self.path.format(self.layer)

    @property
    def worst(self) -> float:
        return max(option.kl for option in self.options)

    def to_json(self) -> dict[str, Any]:
        keys = ("qtype", "tile_size", "bits", "kl")
        options = ((o.qtype, o.tile_size, o.bits / self.count, o.kl) for o in self.options)
        return {
            "group": self.pattern,
            "parameters": self.count,
            "options": [dict(zip(keys, values, strict=True)) for values in options],
        }


@dataclass(frozen=True)
class Model:
    """What there is to choose from: the groups, and what is never quantized. `parameters` counts all weights,
    `other_bits` are the bits of those in no group."""

    groups: tuple[Group, ...]
    parameters: int
    other_bits: int

    def bits(self, options: Sequence[Option]) -> float:
        """Mean bits of a weight, as the report of a quantized checkpoint has it, with these options of the groups."""
        return (self.other_bits + sum(option.bits for option in options)) / self.parameters

    def check(self, target: float) -> None:
        """That some choice has at most `target` bits a weight, and not every choice.

        Raises:
            UsageError: it is not so; the message has the range.
        """
        least = self.bits([min(group.options, key=lambda option: option.bits) for group in self.groups])
        whole = self.bits([group.options[0] for group in self.groups])
        if not least <= target < whole:
            raise UsageError(
                f"{target:g} bits a weight cannot be reached: this model can have {least:.4f} to {whole:.4f}",
                hint=f"all groups in their smallest type have {least:.4f} bits a weight, unquantized it has {whole:g}",
            )


def choose(model: Model, target: float) -> list[Option]:
    """Of each group the option so that the sum of KL is least and bits a weight are at most `target`.

    It takes for granted that divergences add up, which they do only nearly: measure the whole afterwards. Under that
    it is a knapsack that takes one item of each group, solved exactly (Nemhauser and Ullmann, 1969): group by group it
    keeps every pair of sums, bits and KL, that no other beats in both. Where these are more than `STATES`, in models of
    many layers, it keeps as many, evenly by bits, and what it finds may be worse by what the bits between two are
    worth. Which are kept does not depend on the target, so that a larger target never has a larger KL.

    Raises:
        UsageError: see `Model.check`.
    """
    model.check(target)
    bits, kl = np.array([model.other_bits]), np.zeros(1)
    steps: list[tuple[np.ndarray, int]] = []
    for group in model.groups:
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
    at = int(np.searchsorted(bits / model.parameters, target, side="right")) - 1
    chosen = []
    for group, (kept, count) in zip(reversed(model.groups), reversed(steps), strict=True):
        option, at = divmod(int(kept[at]), count)
        chosen.append(group.options[option])
    return chosen[::-1]


# -- as a file --------------------------------------------------------------------------------------------------------


def rules(groups: Sequence[Group], options: Sequence[Option]) -> list[str]:
    """The rules in YAML, one for all layers whose modules of a path get the same."""
    layers: dict[tuple[str, Option], list[int | None]] = {}
    for group, option in zip(groups, options, strict=True):
        if option.qtype:
            layers.setdefault((group.path, Option(option.qtype, option.tile_size, 0, 0)), []).append(group.layer)
    out = []
    for (path, kind), own in layers.items():
        every = [group.layer for group in groups if group.path == path]
        numbers = r"\d+" if own == every and len(own) > 1 else "|".join(map(str, own))
        pattern = path.format(f"({numbers})" if "|" in numbers else numbers)
        tile = f", tile_size: {kind.tile_size}" if kind.tile_size else ""
        out.append(f"- {{module_path: '{pattern}', weight_qtype: {kind.qtype}{tile}}}")
    return out


def to_yaml(model: Model, options: Sequence[Option], made: Sequence[str]) -> str:
    """A config with these options of the groups. Comments are `made`, lines that say where it comes from, and a table
    of what was measured."""
    lines = [f"summary: {model.bits(options):.2f} bits a weight, chosen by measured sensitivity"]
    # A name from elsewhere may hold what breaks a comment.
    lines += [f"# {plain(line)}" for line in made]
    lines += ["#", *(f"#   {plain(line)}" for line in _table(model.groups, options))]
    lines += ["qwix:", "  rules:", *(f"    {rule}" for rule in rules(model.groups, options))]
    gates = default_gates(Rule(0, weight_qtype=option.qtype) for option in options)
    return "\n".join([*lines, f"gates: {{{', '.join(f'{name}: {gate:g}' for name, gate in gates.items())}}}", ""])


def _table(groups: Sequence[Group], options: Sequence[Option]) -> Iterator[str]:
    width = max(len(group.pattern) for group in groups)
    yield f"{'group':{width}}  {'weights':>14}  {'chosen':>8}  KL of each type, nats a token"
    for group, chosen in sorted(zip(groups, options, strict=True), key=lambda pair: -pair[0].worst):
        costs = "  ".join(f"{option} {option.kl:.2e}" for option in group.options[1:])
        yield f"{group.pattern:{width}}  {group.count:14,}  {chosen!s:>8}  {costs}"


def check_free(out: Path, overwrite: bool) -> None:
    """That a recipe can be written there.

    Raises:
        OutputError: there is such a file, and it is not to be replaced.
        ResourceError: none can be made.
        UsageError: it is a folder, or in none.
    """
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"{out} is a folder, or in none", hint="name a file in a folder that there is")
    if out.exists() and not overwrite:
        raise OutputError(f"{out} exists", hint="name another file by --out-config, or give --overwrite")
    try:
        TemporaryFile(dir=out.absolute().parent).close()
    except OSError as e:
        raise ResourceError(f"{out} cannot be written: {e.strerror}", hint="name another file by --out-config") from e


def write(text: str, out: Path, overwrite: bool) -> None:
    """Writes it, unless another file has come to be there since `check_free`, which raises its errors again. An old
    file stays until the new one is complete."""
    check_free(out, overwrite)
    replace_file(out, text.encode())
