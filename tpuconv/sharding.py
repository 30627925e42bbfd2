"""From letters to mesh axes: how an array is laid over devices follows from the letters of its axes.

A mesh has up to four axes. `tensor` divides heads and feed-forward widths, `expert` the experts, `data` batch and model
width. `group` is there where a model has fewer key-value heads than chips: it divides what `tensor` cannot. What has no
experts is divided by `expert` as well, as if it were a second `tensor`.
"""

import re
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from tpuconv.errors import UsageError
from tpuconv.jsonfile import short
from tpuconv.layout import Shape, lead, parse_axes

Rules = Mapping[str, tuple[str, ...]]
"""For each letter the mesh axes that may divide it, together. Letters come in the order in which they choose."""

AxisSharding = str | tuple[str, ...] | None
"""What divides one axis of an array: the entry of a `PartitionSpec`."""

WIDTH_AXES = ("tensor", "group", "expert")
AXES = ("data", *WIDTH_AXES)
"""The names that an axis of a mesh may have."""

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
"""Heads and feed-forward as in Megatron-LM (arXiv:1909.08053), the model width fully sharded as in ZeRO
(arXiv:1910.02054): two all-reduces for a layer, whatever the mesh."""

ACTIVATIONS: Rules = {"B": ("data",), "N": WIDTH_AXES, "K": ("tensor",), "V": WIDTH_AXES}
"""Between the layers: every chip has all tokens of its part of the batch, whole; of heads and logits its own."""

BY_HEAD: Rules = {"B": ("data",), "K": ("tensor",), "G": ("group", "expert"), "N": WIDTH_AXES}
"""Inside of attention and in the cache, while that is small: by heads alone. Where chips are more than key-value heads,
several hold the same keys, each for queries of its own, and nothing is exchanged."""

BY_BATCH: Rules = {
    "K": ("tensor",),
    "B": ("data", "group", "expert", "tensor"),
    "G": ("group", "expert"),
    "N": WIDTH_AXES,
}
"""The same for a larger cache: key-value heads first. The chips that are left divide the batch, so that no two hold the
same keys, or where it is too small the queries of a key-value head. Queries are exchanged, and what becomes of them."""

SMALL_CACHE = 6 << 20
"""Bytes of a layer's cache on a chip up to which `BY_HEAD` divides it. An exchange takes about as long as reading 4 MB,
and each layer would have two (benchmarks/README.md)."""

LANES = 128
"""Of a TPU's vector registers: a width that is no multiple of it is padded."""


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes by axis of a mesh such as `tensor=8,expert=2`.

    Raises:
        UsageError: an axis has no such name, no size, or is named twice.
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in AXES or name in mesh or not re.fullmatch(r"0*[1-9][0-9]{0,8}", size):
            raise UsageError(
                f"{short(part)} of the mesh {short(text)} is no axis with a size",
                hint=f"axes are {', '.join(AXES)}; write tensor=8,expert=2",
            )
        mesh[name] = int(size)
    return mesh


def format_mesh(mesh: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in mesh.items())


def partition(axes: str, shape: Shape, mesh: Mapping[str, int], rules: Rules = MESH_AXES) -> tuple[AxisSharding, ...]:
    """For every axis of an array the mesh axes that divide it, or None.

    `axes` is the array's letters ("D N H"), `mesh` the size of each mesh axis. A mesh axis divides at most one axis of
    an array, and only where the size is a multiple.
    """
    letters = [lead(letters) for letters in parse_axes(axes)]
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
    """The axes of an array that a mesh could divide if their sizes were multiples of it: size by letter."""
    letters = [lead(letters) for letters in parse_axes(axes)]
    multiples = tuple(size * prod(mesh.values()) for size in shape)
    now, then = partition(axes, shape, mesh, rules), partition(axes, multiples, mesh, rules)
    pairs = zip(letters, shape, now, then, strict=True)
    return {letter: size for letter, size, part, possible in pairs if part is None and possible is not None}


def shard_shape(shape: Shape, parts: tuple[AxisSharding, ...], mesh: Mapping[str, int]) -> Shape:
    """The shape of one device's part."""
    names = [(part,) if isinstance(part, str) else part or () for part in parts]
    return tuple(size // prod(mesh[name] for name in own) for size, own in zip(shape, names, strict=True))


def attention_rules(axes: str, shape: Shape, nbytes: int, mesh: Mapping[str, int]) -> Rules:
    """How attention with a layer's cache is divided: `axes` and `shape` are those of its first array, `nbytes` the
    bytes of all of them together."""
    by_head = shard_shape(shape, partition(axes, shape, mesh, BY_HEAD), mesh)
    return BY_HEAD if nbytes * prod(by_head) <= SMALL_CACHE * prod(shape) else BY_BATCH


def decoding_mesh(sizes: Mapping[str, Any], devices: int) -> dict[str, int]:
    """The mesh over which a model decodes with the fewest collectives, two all-reduces for a layer. `sizes` are those
    of the config's letters.

    A dense model has as much `tensor` as it has key-value heads for, and `group` for the rest. One with experts divides
    each by `tensor` down to two registers' width and deals them out over the rest: with one expert whole on a chip, the
    step would wait for the chip whose experts are asked for most.
    """
    heads = devices if "C" in sizes else sizes["K"]  # latent attention caches no heads
    tensor = _largest_divisor(devices, lambda n: heads % n == 0)
    if "E" not in sizes:
        return _without_ones({"tensor": tensor, "group": devices // tensor})
    tensor = _largest_divisor(tensor, lambda n: devices % n == 0 and sizes["M"] % (2 * LANES * n) == 0)
    expert = _largest_divisor(devices // tensor, lambda n: sizes["E"] % n == 0)
    return _without_ones({"tensor": tensor, "group": devices // tensor // expert, "expert": expert})


def _largest_divisor(number: int, fits: Callable[[int], bool]) -> int:
    """The largest divisor that fits, 1 if none does."""
    return next((n for n in range(number, 1, -1) if number % n == 0 and fits(n)), 1)


def _without_ones(mesh: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in mesh.items() if size > 1} or {"tensor": 1}
