"""The groups of parameters for which a recipe chooses a type: modules with the same parent, as in `layers/3/attn`, and
the head.

Each has three options: unquantized, int8 with one scale per channel, int4 in tiles. Qwix itself decides, on the model
with shapes instead of weights, which parameters there are and how each is quantized.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
import numpy as np

from tpuconv.checkpoint.manifest import Manifest, element_bytes
from tpuconv.checkpoint.reader import read_checkpoint_config
from tpuconv.errors import UnsupportedConfig, UsageError
from tpuconv.models.registry import get_family
from tpuconv.quantize.config import QuantConfig, Rule
from tpuconv.quantize.encode import QwixEncoder
from tpuconv.quantize.recipe.search import Option, ParamGroup, SearchSpace
from tpuconv.quantize.rules import ParamQuant, resolve_rules

INT4_TILE_SIZES = (32, 16, 8)
"""The first that divides the tiled axis of all parameters of a group is used; if none does, one scale per channel."""

ROUTER = "router"
"""It chooses the experts of a token, and has few weights: no config of this package quantizes it."""


@dataclass(frozen=True)
class Choices:
    """`space` has the groups with their bits, but not their costs. `encoders` has, by type and parameter, how it is
    quantized."""

    space: SearchSpace
    encoders: Mapping[str, Mapping[str, QwixEncoder]]


def find_choices(manifest: Manifest) -> Choices:
    """The choices for a checkpoint, from its shapes. No weights are read.

    Raises:
        UsageError: the checkpoint is quantized, or holds only a part of a model.
        UnsupportedConfig: its layers are stacked, or Qwix finds nothing to quantize.
    """
    _check_plain(manifest)
    family = get_family(manifest.family)
    config = family.read_config(read_checkpoint_config(manifest), manifest.allow_config, manifest.arrays)

    def encoders(rules: Iterable[Rule]) -> dict[str, QwixEncoder]:
        named = QuantConfig("sensitivity", "", tuple(rules))
        quants = resolve_rules(lambda: family.model_class(config, dtype=jnp.bfloat16), named)
        dtypes = {name: np.dtype(manifest.arrays[name].dtype) for name in quants}
        return {name: QwixEncoder(name, quant, dtypes[name], dtypes[name]) for name, quant in quants.items()}

    int8 = encoders([Rule(0, weight_qtype="int8")])
    groups = _groups(list(int8))
    tiles = {path: _tile([int8[name].quant for name in names]) for path, names in groups.items()}
    int4 = encoders(
        Rule(0, module_path=path.format(layer), weight_qtype="int4", tile_size=tiles[path, layer])
        for path, layer in groups
    )
    plain = {name: 8 * element_bytes(a.dtype) * prod(a.shape) for name, a in manifest.arrays.items()}

    def option(names: Sequence[str], qtype: str, tile: int | None, by: Mapping[str, QwixEncoder]) -> Option:
        return Option(qtype, tile, sum(round(by[name].bits * prod(by[name].quant.shape)) for name in names))

    found = tuple(
        ParamGroup(
            path,
            layer,
            tuple(names),
            sum(prod(int8[name].quant.shape) for name in names),
            (
                Option(None, None, sum(plain[name] for name in names), 0.0),
                option(names, "int8", None, int8),
                option(names, "int4", tiles[path, layer], int4),
            ),
        )
        for (path, layer), names in groups.items()
    )
    rest = sum(plain.values()) - sum(group.options[0].bits for group in found)
    parameters = sum(prod(array.shape) for array in manifest.arrays.values())
    return Choices(SearchSpace(found, parameters, rest), {"int8": int8, "int4": int4})


def _check_plain(manifest: Manifest) -> None:
    if manifest.quantization is not None:
        raise UsageError(
            f"{manifest.folder} is quantized already, with {manifest.quantization['name']}",
            hint="measure the checkpoint that it was made from, or convert with --encoding dequantize",
        )
    manifest.check_complete()
    if manifest.scan_layers:
        raise UnsupportedConfig(
            f"{manifest.folder} has its layers stacked in one array, and a recipe chooses a type for each layer",
            hint="convert without --scan-layers",
        )


def _groups(names: Sequence[str]) -> dict[tuple[str, int | None], list[str]]:
    """The parameters of each group, by its path, with {} for the number of the layer, and that number."""
    modules = {name: name.replace(".", "/").rpartition("/")[0] for name in names}
    by_parent: dict[str, list[str]] = {}
    for name, module in modules.items():
        parent, _, last = module.rpartition("/")
        if last != ROUTER:
            by_parent.setdefault(parent or module, []).append(name)
    out = {}
    for parent, members in by_parent.items():
        own_modules = [modules[name] for name in members]
        inside = [module for module in modules.values() if re.fullmatch(f"{parent}/.*", module)]
        if own_modules == [parent]:
            tail = ""
        elif len(inside) == len(members):
            tail = "/.*"
        else:  # a router is beside them, or another group below
            tail = f"/({'|'.join(module.rpartition('/')[2] for module in own_modules)})"
        layer = re.fullmatch(r"layers/(\d+)(/.*)", parent)
        path, number = (f"layers/{{}}{layer[2]}", int(layer[1])) if layer else (parent, None)
        out[path + tail, number] = members
    return out


def _tile(quants: Sequence[ParamQuant]) -> int | None:
    """The tile size for int4. Qwix tiles the last of the axes that a product sums over."""
    sizes = [
        max((axis, n) for axis, n in enumerate(quant.shape) if axis not in quant.qwix_how.channelwise_axes)[1]
        for quant in quants
    ]
    return next((tile for tile in INT4_TILE_SIZES if not any(size % tile for size in sizes)), None)
