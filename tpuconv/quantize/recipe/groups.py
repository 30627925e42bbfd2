"""The groups of parameters for which a recipe chooses a type: modules with the same parent, as in `layers/3/attn`, and
the head. Where layers are stacked, a group has all layers.

The options of a group are to stay as it is, and `OPTION_KINDS`. Qwix itself decides, on the model with shapes instead
of weights, which parameters there are and how each is quantized.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tpuconv.checkpoint.manifest import Manifest, element_bytes
from tpuconv.checkpoint.reader import check_logits, check_unquantized
from tpuconv.models.common.periods import LayerStacks
from tpuconv.models.registry import get_family
from tpuconv.models.stored import model_config
from tpuconv.quantize.calibrate.layers import HEAD_STAGE
from tpuconv.quantize.config import MSE, QuantConfig, Rule
from tpuconv.quantize.encode import QwixEncoder
from tpuconv.quantize.recipe.search import Option, ParamGroup, SearchSpace
from tpuconv.quantize.rules import LAYER, ModelBuilder, ParamQuant, resolve_rules

OPTION_KINDS: tuple[tuple[str, tuple[int | None, ...]], ...] = (
    ("int8", (None,)),
    ("int4", (128,)),
    ("int4", (64,)),
    ("int4", (32, 16, 8, None)),
)
"""The types to choose from, each with tile sizes: the first is used that divides the tiled axis of all parameters of a
group, None for one scale per channel. A group that none of them divides lacks the option."""

WEIGHT_METHODS = {"int4": MSE}
"""The calibration method of weights, where it is not absmax: at 8 bits it gains nothing."""

FOR_IMAGES = "/images"
"""How the parent of experts for images ends (ERNIE 4.5 VL). These do not run on the texts that costs are measured on.
So they are in the group of the experts for text, as servers need it too."""

ROUTER = "router"
"""It chooses the experts of a token, and has few weights: no config of this package quantizes it."""


@dataclass(frozen=True)
class Choices:
    """`space` has the groups with their bits, but not their costs. `encoders` has, by the name of an option and by
    parameter, how it is quantized."""

    space: SearchSpace
    encoders: Mapping[str, Mapping[str, QwixEncoder]]

    def all_encoders(self) -> dict[str, QwixEncoder]:
        """Returns an encoder of each parameter that some option quantizes."""
        return {name: encoder for encoders in self.encoders.values() for name, encoder in encoders.items()}

    def chosen(self, options: Sequence[Option]) -> dict[str, QwixEncoder]:
        """Returns the quantization of each parameter with these options of the groups."""
        return {
            name: self.encoders[str(option)][name]
            for group, option in zip(self.space.groups, options, strict=True)
            for name in (group.names if option.qtype else ())
        }


def find_choices(manifest: Manifest) -> Choices:
    """Returns the choices for a checkpoint, from its shapes. No weights are read.

    Raises:
        UsageError: the checkpoint is quantized, or holds only a part of a model.
    """
    check_unquantized(manifest)
    manifest.check_complete()
    check_logits(manifest)
    family = get_family(manifest.family)
    config = model_config(manifest)

    stacks = config.stacks if manifest.scan_layers else None

    def quants(rules: Iterable[Rule], stacks: LayerStacks | None) -> dict[str, ParamQuant]:
        named = QuantConfig("sensitivity", "", tuple(rules))
        return resolve_rules(ModelBuilder(family.model_class, config), named, stacks)

    separate = quants([Rule(0, weight_qtype="int8")], None)
    groups = {
        key: ([separate[name] for name in names], list(dict.fromkeys(_stored_name(name, stacks) for name in names)))
        for key, names in _groups([name for name in separate if _is_in_a_stage(name)], stacks).items()
    }
    options: dict[tuple[str, int | None], list[Option]] = {}
    encoders: dict[str, dict[str, QwixEncoder]] = {}
    for qtype, sizes in OPTION_KINDS:
        rules, of_rules = [], []
        for key, (shapes, _) in groups.items():
            if (tile := _tile(shapes, sizes)) != NO_TILE:
                axes = "all" if tile and any(len(quant.summed) > 1 for quant in shapes) else "last"
                method = WEIGHT_METHODS.get(qtype, "absmax")
                option = Option(qtype, tile, 0, tile_axes=axes, method=method)
                rule = Rule(0, key[0].format(key[1]), weight_qtype=qtype, tile_size=tile, tile_axes=axes)
                rules.append(replace(rule, weight_calibration_method=method))
                of_rules.append((key, option))
        is_known = qtype == "int8" and stacks is None  # tracing a model takes time
        found = separate if is_known else quants(rules, stacks) if rules else {}
        dtypes = {name: np.dtype(manifest.arrays[name].dtype) for name in found}
        by_name = {name: QwixEncoder(name, quant, dtypes[name], dtypes[name]) for name, quant in found.items()}
        for key, option in of_rules:
            names = groups[key][1]
            bits = sum(round(by_name[name].bits * prod(by_name[name].quant.shape)) for name in names)
            options.setdefault(key, []).append(replace(option, bits=bits))
            encoders.setdefault(str(option), {}).update({name: by_name[name] for name in names})
    plain = {name: 8 * element_bytes(a.dtype) * prod(a.shape) for name, a in manifest.arrays.items()}
    space = tuple(
        ParamGroup(
            path,
            layer,
            tuple(names),
            sum(prod(manifest.arrays[name].shape) for name in names),
            (Option(None, None, sum(plain[name] for name in names), 0.0), *options[path, layer]),
        )
        for (path, layer), (_, names) in groups.items()
    )
    rest = sum(plain.values()) - sum(group.options[0].bits for group in space)
    parameters = sum(prod(array.shape) for array in manifest.arrays.values())
    return Choices(SearchSpace(space, parameters, rest), encoders)


def _is_in_a_stage(name: str) -> bool:
    """Returns True if a parameter belongs to a layer or the head. The projections that make the inputs of layers (Gemma
    4) or join the streams of the last layer (DeepSeek V4) are not quantized: they are small, and their cost would not
    be the cost of a layer."""
    return name.partition(".")[0] in ("layers", HEAD_STAGE)


def _stored_name(name: str, stacks: LayerStacks | None) -> str:
    """Returns the name of the array that holds a layer's parameter."""
    match = LAYER.fullmatch(name)
    return f"{stacks.find(int(match[1]))[0]}.{match[2]}" if match and stacks else name


def _groups(names: Sequence[str], stacks: LayerStacks | None) -> dict[tuple[str, int | None], list[str]]:
    """Returns the parameters of each group, by its path, with {} for the number of the layer, and that number. If
    layers are stacked, the path has a pattern for the numbers of those in one array."""
    modules = {name: name.replace(".", "/").rpartition("/")[0] for name in names}
    by_parent: dict[str, list[str]] = {}
    for name, module in modules.items():
        parent, _, last = module.rpartition("/")
        if last != ROUTER:
            by_parent.setdefault(parent.removesuffix(FOR_IMAGES) or module, []).append(name)
    out: dict[tuple[str, int | None], list[str]] = {}
    for parent, members in by_parent.items():
        group_modules = [modules[name] for name in members]
        inside = [module for module in modules.values() if re.fullmatch(f"{parent}/.*", module)]
        if group_modules == [parent]:
            tail = ""
        elif len(inside) == len(members):
            tail = "/.*"
        else:  # a router is beside them, or another group below
            tail = f"/({'|'.join(module.removeprefix(f'{parent}/') for module in group_modules)})"
        layer = re.fullmatch(r"layers/(\d+)(/.*)", parent)
        if layer and stacks and stacks.find(int(layer[1]))[1] is not None:
            mates = stacks.at_place(int(layer[1]) % stacks.period)
            numbers = r"\d+" if stacks.period == 1 else f"({'|'.join(map(str, mates))})"
            out.setdefault((f"layers/{numbers}{layer[2]}{tail}", None), []).extend(members)
        elif layer:
            out[f"layers/{{}}{layer[2]}{tail}", int(layer[1])] = members
        else:
            out[parent + tail, None] = members
    return out


NO_TILE = -1
"""There is no tile size that divides."""


def _tile(quants: Sequence[ParamQuant], sizes: Sequence[int | None]) -> int | None:
    """Returns the first tile size that divides, or `NO_TILE`. Qwix tiles the last of the axes that a product sums
    over."""
    widths = [quant.shape[quant.summed[-1]] for quant in quants]
    return next((tile for tile in sizes if tile is None or not any(width % tile for width in widths)), NO_TILE)
