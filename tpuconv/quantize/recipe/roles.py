"""Chooses types for a number of bits by the roles of parameters, without a run of the model.

`ROLES` has the types that a role can take, and its importance: the loss of the model by a weight of this role relative
to a weight of `gate` and `up` of a dense MLP, both in the same type. `NOISE` has the relative power of the error of a
type. A greedy search begins with the fewest bits and takes the step that removes the most error per bit, until no step
fits. It is exact up to the last step, since each further bit of a parameter removes less than the one before.

The importances of attention and MLPs are measured on the trained example (`benchmarks/auto_bits.py`). Routed experts
count less, since a token passes few of them. Wide shared experts, attention and outputs of states follow Unsloth's
comparison of 121 quantizations of Qwen3.5-35B-A3B.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from math import ceil, prod
from typing import Any

from tpuconv.errors import UsageError
from tpuconv.models.common.periods import LayerStacks
from tpuconv.quantize.config import MSE, QTYPES, REQUIRED_TILE_SIZES, QuantConfig, Rule, parse_config
from tpuconv.quantize.recipe.search import Option, ParamGroup, SearchSpace, rules
from tpuconv.quantize.rules import LAYER, ParamQuant, resolve_rules

ALWAYS_INT8 = ("int8",)
ALL_TYPES = ("int4/128", "int4/64", "int4/32", "int8")

NOISE = {"int4/128": 1.0, "int4/64": 0.86, "int4/32": 0.72, "int8": 0.006, "mxfp4": 0.0}
"""Power of the error of normal weights relative to int4 in groups of 128: 19.1, 19.8, 20.5 and 41.7 dB. Weights of
a release in MXFP4 are copied."""

TILES: Mapping[str, tuple[int, ...]] = {"int4/128": (128,), "int4/64": (64,), "int4/32": (32, 16, 8)}
"""The group sizes of a type: the first that divides the inputs of all parameters is used."""

FIRST_LAYER = 3.0
"""The factor of the importance of the first layer."""


@dataclass(frozen=True)
class Role:
    """A kind of parameters.

    Attributes:
        name: for messages.
        pattern: of the modules within a layer, where `mamba` and `delta` stand for mixers whose states decay.
        types: the possible types, from few bits to many; none if the parameters stay unquantized.
        importance: the relative loss by the error of a weight.
    """

    name: str
    pattern: str
    types: tuple[str, ...]
    importance: float = 1.0


ROLES = (
    Role("routers", r"(.*/)?router(_shared)?", ()),
    Role("states and decays", r"(mamba|delta)/(o|a|b|c|dt|dt_a|f|f_a|f_b)", ALWAYS_INT8),
    Role("selection of tokens", r"(\w+/)?attn/(indexer|compressor)/.*", ALWAYS_INT8),
    Role("shared experts, down", r"moe/shared/down", ALL_TYPES, 6.0),
    Role("shared experts, gate and up", r"moe/shared/(gate|up)", ALL_TYPES, 4.0),
    Role("experts, down", r"moe/(images/)?down", ALL_TYPES, 0.2),
    Role("experts, gate and up", r"moe/(images/)?(gate|up)", ALL_TYPES, 0.1),
    Role("latents", r"(\w+/)?attn/(q_a|kv_a|k_rope|kv)", ALL_TYPES, 6.0),
    Role("outputs of attention", r"(\w+/)?attn/o(_a|_b)?", ALL_TYPES, 2.0),
    Role("inputs of attention", r"((\w+/)?attn|mamba|delta)/\w+", ALL_TYPES, 2.7),
    Role("MLP, down", r"(\w+/)?mlp/down", ALL_TYPES, 1.4),
    Role("MLP, gate and up", r"(\w+/)?mlp/(gate|up)", ALL_TYPES, 1.0),
)
"""The first that matches a module counts. Modules that match none stay unquantized: norms, embeddings, the head (which
most servers do not take quantized), the small products of residual streams."""

SERVED_ROLES = (
    Role("inputs of Mamba", r"mamba/(x|z|b|c|dt)", ALWAYS_INT8),
    Role("experts", r"moe/(images/)?(gate|up|down)", ALL_TYPES, 0.13),
)
"""The roles that come before `ROLES` for servers: these join the parameters, and take one type for them."""

DECAY = re.compile(r"(attn|mamba)/(a|dt|f|f_a)")
"""The modules that a mixer has if its state decays: `dt` in Mamba-2, the others in variants of the delta rule."""


@dataclass(frozen=True)
class _Unit:
    """Parameters that get the same type: of one role, in one layer or in the layers of a stack."""

    role: Role
    path: str
    layer: int | None
    quants: Mapping[str, ParamQuant]

    @property
    def count(self) -> int:
        """The number of weights."""
        return sum(prod(quant.shape) for quant in self.quants.values())

    def group(self, scale_bits: int, released: Collection[str]) -> ParamGroup:
        """Returns the unit with its options, whose cost is an estimate."""
        options = tuple(self._options(scale_bits, released))
        return ParamGroup(self.path, self.layer, tuple(self.quants), self.count, options)

    def _options(self, scale_bits: int, released: Collection[str]) -> Iterator[Option]:
        if released and all(name in released for name in self.quants):
            block = REQUIRED_TILE_SIZES["mxfp4"]
            with_scales = self.count * (QTYPES["mxfp4"] + 8 / block)  # scales are powers of two, of a byte
            yield Option("mxfp4", block, round(with_scales), NOISE["mxfp4"])
            return
        quants = self.quants.values()
        importance = self.role.importance * self.count * (FIRST_LAYER if self.layer == 0 else 1)
        for kind in self.role.types:
            qtype, cost = kind.partition("/")[0], importance * NOISE[kind]
            if kind not in TILES:
                bits = sum(
                    prod(quant.shape) * (QTYPES[qtype] + scale_bits / prod(quant.group_shape)) for quant in quants
                )
                yield Option(qtype, None, round(bits), cost)
            elif tile := next((size for size in TILES[kind] if self._is_divided_by(size)), None):
                axes = "all" if any(len(quant.summed) > 1 for quant in quants) else "last"
                bits = self.count * (QTYPES[qtype] + scale_bits / tile)
                yield Option(qtype, tile, round(bits), cost, tile_axes=axes, method=MSE)

    def _is_divided_by(self, size: int) -> bool:
        return not any(quant.shape[quant.summed[-1]] % size for quant in self.quants.values())


def recipe_for_bits(
    config: QuantConfig,
    build: Callable[[], Any],
    stacks: LayerStacks | None = None,
    *,
    scale_bits: int = 16,
    released: Collection[str] = (),
    for_servers: bool = False,
) -> QuantConfig:
    """Returns a config with the rules for `config.target_bits` bits per quantized weight, scales included.

    Args:
        config: has the bits.
        build: makes the model with separate layers.
        stacks: how layers are stacked, if they are: stacked layers get the same types.
        scale_bits: the size of a scale.
        released: the parameters that the source has in MXFP4, by their names in a model of separate layers.
        for_servers: give one type to all parameters that servers join.

    Raises:
        UsageError: the number of bits is too small; the message has the smallest.
    """
    assert config.target_bits is not None
    everything = QuantConfig(config.name, "", (Rule(0, weight_qtype="int8"),))
    units = _units(resolve_rules(build, everything), stacks, for_servers=for_servers)
    groups = tuple(unit.group(scale_bits, released) for unit in units)
    space = SearchSpace(groups, sum(group.count for group in groups), 0)
    chosen = _chosen(space, config.target_bits)
    lines = [f"summary: '{space.bits(chosen):.3f} bits per quantized weight: {_description(units, chosen)}'"]
    lines += ["qwix:", "  rules:", *(f"    {rule}" for rule in rules(groups, chosen))]
    return parse_config("\n".join(lines).encode(), config.name, config.name)


def _units(quants: Mapping[str, ParamQuant], stacks: LayerStacks | None, *, for_servers: bool) -> list[_Unit]:
    """Returns the parameters that have a role with types."""
    roles = (*SERVED_ROLES, *ROLES) if for_servers else ROLES
    modules = {
        name: (int(match[1]), match[2].replace(".", "/"))
        for name in quants
        if (match := LAYER.fullmatch(name.rpartition(".")[0]))
    }
    mixers = {
        (layer, found[1]): "mamba" if found[2] == "dt" else "delta"
        for layer, tail in modules.values()
        if (found := DECAY.fullmatch(tail))
    }
    members: dict[tuple[str, int | None, Role], list[str]] = {}
    for name, (layer, tail) in modules.items():
        parent, _, last = tail.rpartition("/")
        shown = f"{mixers.get((layer, parent), parent)}/{last}"
        role = next((role for role in roles if re.fullmatch(role.pattern, shown)), None)
        if role is not None and role.types:
            numbers, number = _numbers(layer, stacks)
            top = tail.partition("/")[0]  # one rule for all of a role below it: they may be joined in one tensor
            members.setdefault((f"layers/{numbers}/{top}", number, role), []).append(name)
    units = []
    for (parent, number, role), names in members.items():
        last_names = "|".join(dict.fromkeys(modules[name][1].partition("/")[2] for name in names))
        path = f"{parent}/({last_names})" if "|" in last_names else f"{parent}/{last_names}"
        units.append(_Unit(role, path, number, {name: quants[name] for name in names}))
    return units


def _numbers(layer: int, stacks: LayerStacks | None) -> tuple[str, int | None]:
    """Returns the pattern for the numbers of the layers that are stacked with a layer, and None; or {} and its
    number."""
    if stacks is None or stacks.find(layer)[1] is None:
        return "{}", layer
    if stacks.period == 1:
        return r"\d+", None
    return f"({'|'.join(map(str, stacks.at_place(layer % stacks.period)))})", None


def _chosen(space: SearchSpace, target: float) -> list[Option]:
    """Returns the option of each group.

    Raises:
        UsageError: the first options of all groups have more than `target` bits per weight.
    """
    groups = space.groups
    chosen = [0] * len(groups)
    least = space.bits([group.options[0] for group in groups])
    if least > target:
        raise UsageError(
            f"{target:g} bits per quantized weight are too few for this model: the least are "
            f"{ceil(least * 1000) / 1000:.3f}",
            hint="weights have 4 bits and scales, and states 8; give more bits",
        )
    left = target * space.parameters - least * space.parameters
    steps = [step for number in range(len(groups)) for step in _step(groups, chosen, number)]
    heapify(steps)
    while steps:
        _, number, bits = heappop(steps)
        if bits <= left:
            left -= bits
            chosen[number] += 1
            for step in _step(groups, chosen, number):
                heappush(steps, step)
    return [group.options[option] for group, option in zip(groups, chosen, strict=True)]


def _step(groups: Sequence[ParamGroup], chosen: Sequence[int], number: int) -> Iterator[tuple[float, int, int]]:
    """Yields the next option of a group, if it has another: the negative cost that it removes per bit, number, bits."""
    for now, more in list(pairwise(groups[number].options))[chosen[number] : chosen[number] + 1]:
        bits = more.bits - now.bits
        yield (more.kl - now.kl) / bits, number, bits


def _description(units: Sequence[_Unit], chosen: Sequence[Option]) -> str:
    """Returns the types of each role."""
    of_roles: dict[str, dict[str, int]] = {}
    for unit, option in zip(units, chosen, strict=True):
        types = of_roles.setdefault(unit.role.name, {})
        types[str(option)] = types.get(str(option), 0) + 1
    return "; ".join(
        f"{name} " + " and ".join(f"{kind} ({count})" if len(types) > 1 else kind for kind, count in types.items())
        for name, types in of_roles.items()
    )
