"""Sharding by letters: the letters of an array's axes determine the mesh axes that it is sharded over. A word follows
the letter of its declaration (`tpuconv.notation.letters.Word`).

A mesh has up to four axes. Heads and MLP widths are sharded over `tensor`, experts over `expert`, batch and model width
over `data`. `group` is for models with fewer key-value heads than chips: it shards what `tensor` cannot. Arrays without
an expert axis are sharded over `expert` as if it were a second `tensor`.
"""

import re
from collections.abc import Callable, Mapping
from math import prod

from tpuconv.errors import UsageError
from tpuconv.jsonfile import short
from tpuconv.notation.layout import UNIT, Axes, Shape, Sizes, lead, parse_axes
from tpuconv.notation.letters import meaning, sharded_as

Rules = Mapping[str, tuple[str, ...]]
"""For each letter the mesh axes that it may be sharded over, together. Earlier letters take mesh axes first."""

AxisSharding = str | tuple[str, ...] | None
"""The mesh axes that one axis of an array is sharded over: an entry of a `PartitionSpec`."""

WIDTH_AXES = ("tensor", "group", "expert")
AXES = ("data", *WIDTH_AXES)
"""The names of mesh axes."""
OTHER_NAMES = {"fsdp": "data"}
"""The names of mesh axes in MaxText, and ours."""
_MESH_HINT = f"axes are {', '.join((*AXES, *OTHER_NAMES))}; write tensor=8,expert=2"

MESH_AXES: Rules = {
    "E": ("expert",),
    "V": WIDTH_AXES,
    "N": WIDTH_AXES,
    "K": ("tensor",),
    "F": WIDTH_AXES,
    "M": WIDTH_AXES,
    "W": WIDTH_AXES,
    "D": ("data",),
}
"""The rules for parameters. Heads and MLPs are sharded as in Megatron-LM (arXiv:1909.08053), the model width as in ZeRO
(arXiv:1910.02054). A layer needs two all-reduces on any mesh."""

ACTIVATIONS: Rules = {"B": ("data",), "N": WIDTH_AXES, "K": ("tensor",), "V": WIDTH_AXES}
"""The rules for activations between layers. The batch is sharded over `data`, the model width is replicated; heads and
logits are sharded."""

BY_HEAD: Rules = {"B": ("data",), "K": ("tensor",), "G": ("group", "expert"), "N": WIDTH_AXES}
"""For attention with a small cache: sharded over heads only. If there are more chips than key-value heads, several
chips hold the same keys and values, each for other query heads, and no data is exchanged."""

BY_BATCH: Rules = {
    "K": ("tensor",),
    "B": ("data", "group", "expert", "tensor"),
    "G": ("group", "expert"),
    "N": WIDTH_AXES,
}
"""For attention with a large cache: sharded over key-value heads first, then over the batch, so that no two chips hold
the same keys. If the batch is too small, the query heads of a key-value head are sharded. Queries and outputs of
attention are exchanged between chips."""

SMALL_CACHE = 6 << 20
"""The largest bytes of a layer's cache on one chip for which `BY_HEAD` is used. `BY_BATCH` needs two exchanges in each
layer, each of which takes about as long as reading 4 MB (benchmarks/README.md)."""

LANES = 128
"""Lanes of a TPU's vector registers. A width that is not a multiple of it is padded."""


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the size of each axis of a mesh such as "tensor=8,expert=2".

    Raises:
        UsageError: an axis has an unknown name or no size, or is named twice.
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name in mesh or not re.fullmatch(r"0*[1-9][0-9]{0,8}", size):
            raise UsageError(f"{short(part)} in the mesh {short(text)} is not an axis with a size", hint=_MESH_HINT)
        mesh[name] = int(size)
    return named_mesh(mesh)


def named_mesh(mesh: Mapping[str, int]) -> dict[str, int]:
    """Returns a mesh with our names of its axes: `fsdp`, as MaxText calls it, is `data`.

    Raises:
        UsageError: an axis has an unknown name or no devices, or two have the same name.
    """
    names = [OTHER_NAMES.get(name, name) for name in mesh]
    for given, name in zip(mesh, names, strict=True):
        if name not in AXES or names.count(name) > 1:
            raise UsageError(f"{short(given)} is not the name of one axis of a mesh", hint=_MESH_HINT)
        if mesh[given] < 1:
            raise UsageError(f"the axis {name} of a mesh cannot have {mesh[given]} devices", hint="give at least 1")
    return dict(zip(names, mesh.values(), strict=True))


def format_mesh(mesh: Mapping[str, int]) -> str:
    """Returns the inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def _names(axes: str) -> list[str]:
    """Returns the name that each axis is sharded by: its outermost one. Query heads that lie in groups are query
    heads."""
    return ["N" if str(axis) == "(K G)" else lead(axis) for axis in parse_axes(axes)]


def undeclared(axes: str) -> list[str]:
    """Returns the words of an array's axes that no loaded module declares."""
    return [name for name in _names(axes) if len(name) > 1 and not meaning(name)]


def letter_sizes(tensor: Axes, sizes: Sizes) -> Shape:
    """Returns, for each axis of an array, the number of elements of the letter that it is sharded by, for `partition`
    to leave each of them whole: heads of matrices [N H, D]. 1 for a concatenation, which has no such letter."""
    grouped = [str(axis) == "(K G)" for axis in tensor]  # query heads, as in `_names`
    return tuple(
        axis.size(sizes) if is_grouped else sizes.get(lead(axis), 1)
        for axis, is_grouped in zip(tensor, grouped, strict=True)
    )


def partition(axes: str, shape: Shape, mesh: Mapping[str, int], rules: Rules = MESH_AXES) -> tuple[AxisSharding, ...]:
    """Returns, for each axis of an array, the mesh axes that it is sharded over, or None.

    At most one axis of an array is sharded over each mesh axis, and only if its size is a multiple.

    Args:
        axes: the array's letters ("D N H").
        shape: its shape.
        mesh: size of each mesh axis.
        rules: the mesh axes that each letter may be sharded over.
    """
    letters = ["" if name in ("", UNIT) else sharded_as(name) for name in _names(axes)]
    parts: list[AxisSharding] = [None] * len(letters)
    taken: set[str] = set()
    for letter, names in rules.items():
        for at, size in enumerate(shape):
            if letters[at] != letter:
                continue
            chosen: list[str] = []
            for name in names:
                if name in mesh and name not in taken and size % prod(mesh[a] for a in (*chosen, name)) == 0:
                    chosen.append(name)
            taken.update(chosen)
            parts[at] = tuple(chosen) if len(chosen) > 1 else chosen[0] if chosen else None
    return tuple(parts)


def undivided(axes: str, shape: Shape, mesh: Mapping[str, int], rules: Rules = MESH_AXES) -> dict[str, int]:
    """Returns the axes of an array that are not sharded because their size is not a multiple of a mesh axis: the size
    of each letter."""
    multiples = tuple(size * prod(mesh.values()) for size in shape)
    now, then = partition(axes, shape, mesh, rules), partition(axes, multiples, mesh, rules)
    pairs = zip(_names(axes), shape, now, then, strict=True)
    return {name: size for name, size, part, possible in pairs if part is None and possible is not None}


def shard_shape(shape: Shape, parts: tuple[AxisSharding, ...], mesh: Mapping[str, int]) -> Shape:
    """Returns the shape of one device's shard, given what `partition` returned."""
    names = [(part,) if isinstance(part, str) else part or () for part in parts]
    return tuple(size // prod(mesh[name] for name in axes) for size, axes in zip(shape, names, strict=True))


def attention_rules(axes: str, shape: Shape, nbytes: int, mesh: Mapping[str, int]) -> Rules:
    """Returns the rules for attention with a layer's cache: `BY_HEAD` or `BY_BATCH`.

    Args:
        axes, shape: letters and shape of the first array of the cache.
        nbytes: bytes of all its arrays.
        mesh: size of each mesh axis.
    """
    by_head = shard_shape(shape, partition(axes, shape, mesh, BY_HEAD), mesh)
    return BY_HEAD if nbytes * prod(by_head) <= SMALL_CACHE * prod(shape) else BY_BATCH


def decoding_mesh(sizes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Returns the mesh with which a model decodes with the fewest collectives: two all-reduces in a layer.

    A dense model gets the largest `tensor` that divides its key-value heads, and `group` for the rest. In a model with
    experts, each expert is sharded over `tensor` down to a width of 2 x `LANES`, and the experts are sharded over the
    rest. Otherwise, with complete experts on each chip, a step would wait for the chip with the most chosen experts.

    Args:
        sizes: the size of each letter, as `DecoderConfig.sizes`.
        devices: number of devices.
    """
    # The cache of latent attention has no heads; without attention, groups of a state are sharded as heads are.
    heads = devices if "C" in sizes else sizes.get("K", sizes.get("groups", 1))
    tensor = _largest_divisor(devices, lambda n: heads % n == 0)
    if "E" not in sizes:
        return _without_ones({"tensor": tensor, "group": devices // tensor})
    tensor = _largest_divisor(tensor, lambda n: devices % n == 0 and sizes["M"] % (2 * LANES * n) == 0)
    expert = _largest_divisor(devices // tensor, lambda n: sizes["E"] % n == 0)
    return _without_ones({"tensor": tensor, "group": devices // tensor // expert, "expert": expert})


def _largest_divisor(number: int, fits: Callable[[int], bool]) -> int:
    """Returns the largest divisor for which `fits` holds; 1 if there is none."""
    return next((n for n in range(number, 1, -1) if number % n == 0 and fits(n)), 1)


def _without_ones(mesh: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in mesh.items() if size > 1} or {"tensor": 1}
