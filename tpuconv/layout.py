"""Layouts: how the axes of checkpoint tensors become the axes of parameters, written in letters.

    V D -> D V                              a transpose
    (N H) D -> D N H                        a product of axes taken apart: q_proj becomes (D, heads, head)
    (N (P + H)) C -> C N P, C N H           a concatenation split into two parameters
    M D -> E D M                            with E an index in the tensor's name: experts stacked
    E (M (1 + 1)) D -> E D M, E D M         every second row: two matrices interleaved

A layout is an invertible rearrangement: swapping its sides is the inverse. A letter means one thing everywhere
(`LETTERS`): in a layout, in the einsum of a layer, in a parameter's shape and in its sharding.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import gcd, prod

import numpy as np

from tpuconv.errors import LayoutError

LETTERS = {
    "B": "batch",
    "T": "time: positions of this call's tokens",
    "S": "source positions: the keys that attention looks at",
    "D": "model width (hidden size)",
    "A": "model width too, of what goes into a square matrix",
    "N": "query heads",
    "K": "key-value heads",
    "G": "query heads per key-value head (N = K G)",
    "H": "head dimension",
    "F": "feed-forward width",
    "V": "vocabulary",
    "L": "layers",
    "I": "layers with one feed-forward network, in a model where others have experts",
    "J": "layers with experts, in a model where others have one feed-forward network",
    "U": "layers that predict further tokens (MTP), after the model's own",
    "E": "experts",
    "M": "feed-forward width of one expert",
    "W": "feed-forward width of all shared experts together",
    "C": "latent width of keys and values (kv_lora_rank)",
    "Q": "latent width of queries (q_lora_rank)",
    "P": "head dimension without rotary position",
    "R": "head dimension with rotary position",
}

UNIT = "1"
"""An axis of one element, which a tensor without it has too."""

Sizes = Mapping[str, int]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """A letter (`op` is ""), a product `(N H)` (`op` is "*", outermost part first) or a concatenation `(P + R)`
    ("+")."""

    letter: str = ""
    op: str = ""
    parts: "tuple[Axis, ...]" = ()

    def size(self, sizes: Sizes) -> int:
        if not self.op:
            return 1 if self.letter == UNIT else sizes[self.letter]
        part_sizes = (part.size(sizes) for part in self.parts)
        return prod(part_sizes) if self.op == "*" else sum(part_sizes)

    def letters(self) -> Iterator[str]:
        if not self.op:
            yield self.letter
        for part in self.parts:
            yield from part.letters()

    def __str__(self) -> str:
        if not self.op:
            return self.letter
        return "(" + (" " if self.op == "*" else " + ").join(map(str, self.parts)) + ")"


Axes = tuple[Axis, ...]
"""The axes of one tensor, outermost first."""


def format_axes(tensor: Axes) -> str:
    """The axes as a table writes them: "(N H) D"."""
    return " ".join(map(str, tensor))


def parse_axes(text: str) -> Axes:
    """The inverse of `format_axes`."""
    (tensor,) = _parse_side(text, text)
    return tensor


@dataclass(frozen=True)
class Layout:
    """One side's tensors and the other's, with the same letters in both."""

    src: tuple[Axes, ...]
    dst: tuple[Axes, ...]

    def __post_init__(self) -> None:
        atoms = [
            sorted("".join(sorted(atom)) for t in side for atom in _atom_letters(t)) for side in (self.src, self.dst)
        ]
        if atoms[0] != atoms[1]:
            raise LayoutError(f"the sides of '{self}' hold different pieces: {atoms[0]} and {atoms[1]}")

    @classmethod
    @cache
    def parse(cls, text: str, stack: str = "") -> "Layout":
        """Reads `src -> dst`, tensors separated by commas; without an arrow both sides are the same. The letters of
        `stack` are prepended, outermost first, to every source tensor."""
        left, arrow, right = text.partition("->")
        front = tuple(map(Axis, stack))
        src = tuple(front + tensor for tensor in _parse_side(left, text))
        return cls(src, _parse_side(right, text) if arrow else src)

    @property
    def inverse(self) -> "Layout":
        return Layout(self.dst, self.src)

    def src_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        return tuple(tuple(axis.size(sizes) for axis in t) for t in self.src)

    def dst_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        return self.inverse.src_shapes(sizes)

    def __call__(self, tensors: Sequence[np.ndarray], sizes: Sizes) -> list[np.ndarray]:
        """The target tensors. They are views of the sources wherever numpy can express them as such."""
        atoms: list[tuple[str, np.ndarray]] = []
        for array, axes, shape in zip(tensors, self.src, self.src_shapes(sizes), strict=True):
            if array.shape != shape:
                raise LayoutError(f"a tensor of shape {array.shape} where '{format_axes(axes)}' needs {shape}")
            atoms += _split(array, axes, sizes)
        # Several atoms may have the same letters, as in (F + F): they are taken in reading order.
        return [_join(atoms, axes, sizes) for axes in self.dst]

    def __str__(self) -> str:
        src, dst = (", ".join(map(format_axes, side)) for side in (self.src, self.dst))
        return src if src == dst else f"{src} -> {dst}"


def _parse_side(side: str, text: str) -> tuple[Axes, ...]:
    tokens = re.findall(r"\S", side)

    def axes() -> Axis:
        parts: list[Axis] = []
        plus = 0
        while tokens and tokens[0] not in "),":
            token = tokens.pop(0)
            if token == "(":
                parts.append(axes())
                if not tokens or tokens.pop(0) != ")":
                    raise LayoutError(f"unbalanced brackets in '{text}'")
            elif token == "+":
                plus += 1
            elif token in LETTERS or token == UNIT:
                parts.append(Axis(token))
            else:
                raise LayoutError(f"'{token}' in '{text}' is no letter of tpuconv.layout.LETTERS")
        if plus and plus != len(parts) - 1:
            raise LayoutError(f"'{text}' mixes a product and a concatenation in one bracket")
        return Axis(op="+" if plus else "*", parts=tuple(parts))

    tensors = [axes()]
    while tokens:
        if tokens.pop(0) != ",":
            raise LayoutError(f"unbalanced brackets in '{text}'")
        tensors.append(axes())
    if any(t.op == "+" for t in tensors):
        raise LayoutError(f"a concatenation in '{text}' stands outside brackets")
    return tuple(t.parts for t in tensors)


def _first_composite(axes: Axes) -> int | None:
    return next((i for i, axis in enumerate(axes) if axis.op), None)


def _atom_letters(axes: Axes) -> list[tuple[str, ...]]:
    """The letters of each piece without products and concatenations that `_split` makes of a tensor."""
    i = _first_composite(axes)
    if i is None:
        return [tuple(axis.letter for axis in axes if axis.letter != UNIT)]
    if axes[i].op == "*":
        return _atom_letters(axes[:i] + axes[i].parts + axes[i + 1 :])
    return [atom for part in axes[i].parts for atom in _atom_letters(axes[:i] + (part,) + axes[i + 1 :])]


def _split(array: np.ndarray, axes: Axes, sizes: Sizes) -> list[tuple[str, np.ndarray]]:
    """Takes a tensor apart into atoms, its pieces whose axes are plain letters, in reading order. All are views."""
    i = _first_composite(axes)
    if i is None:
        units = tuple(n for n, axis in enumerate(axes) if axis.letter == UNIT)
        return [("".join(axis.letter for axis in axes if axis.letter != UNIT), array.squeeze(units))]
    if axes[i].op == "*":
        shape = array.shape[:i] + tuple(part.size(sizes) for part in axes[i].parts) + array.shape[i + 1 :]
        return _split(array.reshape(shape), axes[:i] + axes[i].parts + axes[i + 1 :], sizes)
    atoms, start = [], 0
    for part in axes[i].parts:
        stop = start + part.size(sizes)
        piece = array[(slice(None),) * i + (slice(start, stop),)]
        atoms += _split(piece, axes[:i] + (part,) + axes[i + 1 :], sizes)
        start = stop
    return atoms


def _join(atoms: list[tuple[str, np.ndarray]], axes: Axes, sizes: Sizes) -> np.ndarray:
    """The inverse of `_split`: takes the atoms that `axes` needs out of the list and builds the tensor."""
    i = _first_composite(axes)
    if i is None:
        letters = [axis.letter for axis in axes if axis.letter != UNIT]
        at = next(n for n, (have, _) in enumerate(atoms) if sorted(have) == sorted(letters))
        have, array = atoms.pop(at)
        array = array.transpose([have.index(letter) for letter in letters])
        return np.expand_dims(array, tuple(n for n, axis in enumerate(axes) if axis.letter == UNIT))
    if axes[i].op == "*":
        array = _join(atoms, axes[:i] + axes[i].parts + axes[i + 1 :], sizes)
        return array.reshape(array.shape[:i] + (-1,) + array.shape[i + len(axes[i].parts) :])
    return np.concatenate([_join(atoms, axes[:i] + (p,) + axes[i + 1 :], sizes) for p in axes[i].parts], axis=i)


# -- slices: which source elements feed a range of one letter ---------------------------------------------------------


def lead(axis: Axis) -> str:
    """The letter whose ranges cut an axis into contiguous ranges: itself or the outermost of a product ("" for a
    concatenation, which has none)."""
    while axis.op == "*":
        axis = axis.parts[0]
    return axis.letter


def sliceable(layout: Layout, letter: str) -> bool:
    """Whether a range of `letter` is a box of every target, fed by a part of every source."""
    once = all([*(name for axis in t for name in axis.letters())].count(letter) == 1 for t in layout.dst)
    everywhere = all(letter in atom for t in layout.src for atom in _atom_letters(t))
    return once and everywhere and all(letter in map(lead, t) for t in layout.dst)


Ranges = Mapping[str, tuple[int, int]]
"""[start, stop) for each letter that is cut."""


def cut_sizes(sizes: Sizes, ranges: Ranges) -> dict[str, int]:
    """The sizes of what remains when every letter of `ranges` is cut to its range."""
    return {**sizes, **{letter: stop - start for letter, (start, stop) in ranges.items()}}


def runs(tensor: Axes, sizes: Sizes, ranges: Ranges) -> list[tuple[int, int]]:
    """The [start, stop) of flat (row-major) element numbers of a tensor that lie in all `ranges`.

    Read one after the other they are, row-major, the same tensor with `cut_sizes(sizes, ranges)`, so that the layout
    applies to them as it stands.
    """
    return _axis_runs(Axis(op="*", parts=tensor), sizes, ranges)[1]


def _axis_runs(axis: Axis, sizes: Sizes, ranges: Ranges) -> tuple[int, list[tuple[int, int]]]:
    if not axis.op:
        size = axis.size(sizes)
        return size, [ranges.get(axis.letter, (0, size))]
    parts = [_axis_runs(part, sizes, ranges) for part in axis.parts]
    if axis.op == "+":
        starts = accumulate((size for size, _ in parts), initial=0)
        return axis.size(sizes), _merged(
            [(at + a, at + b) for at, (_, own) in zip(starts, parts, strict=False) for a, b in own]
        )
    total, inner = 1, [(0, 1)]
    for size, own in reversed(parts):
        if inner == [(0, total)]:
            inner = [(a * total, b * total) for a, b in own]
        else:
            inner = [(i * total + a, i * total + b) for lo, hi in own for i in range(lo, hi) for a, b in inner]
        total *= size
    return total, _merged(inner)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for a, b in ranges:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


# -- block scales: what a layout does to the scales of a quantized tensor ---------------------------------------------


@dataclass(frozen=True)
class ScaleLayout:
    """How the scales of a tensor go through its layout. `layout(refined scales, sizes)` gives each target's scales.

    `refine` says, per source and axis, how often each scale is repeated first (1 where blocks and axes fit), so that no
    block straddles two places of the target. Repeating is exact: nothing is requantized. `dst_blocks` are the block
    sizes of each target's axes.
    """

    layout: Layout
    sizes: dict[str, int]
    src_shapes: tuple[Shape, ...]
    refine: tuple[Shape, ...]
    dst_blocks: tuple[Shape, ...]

    def __call__(self, scales: Sequence[np.ndarray]) -> list[np.ndarray]:
        refined = []
        wanted = self.layout.src_shapes(self.sizes)
        for scale, shape, repeats, want in zip(scales, self.src_shapes, self.refine, wanted, strict=True):
            if scale.shape != shape:
                raise LayoutError(f"scales of shape {scale.shape} where the blocks need {shape}")
            repeated = scale
            for axis, n in enumerate(repeats):
                if n > 1:
                    repeated = np.repeat(repeated, n, axis=axis)
            refined.append(repeated[tuple(slice(n) for n in want)])
        return self.layout(refined, self.sizes)


def scale_layout(layout: Layout, sizes: Sizes, blocks: Sequence[Sequence[int]]) -> ScaleLayout:
    """The layout of block scales, given the block size of every axis of every source.

    Scale i of an axis of n elements with block b covers elements [i b, min((i+1) b, n)). Where a block does not fit the
    target's axes it is refined to the greatest common divisor of what it meets.
    """
    letter_blocks: dict[str, int] = {}
    changed = True

    def spread(axis: Axis, block: int) -> None:
        """Lets a block of an axis constrain its letters, so that block borders are borders of its parts too."""
        nonlocal changed
        size = axis.size(sizes)
        if not axis.op:
            old = letter_blocks.get(axis.letter, 0)  # gcd(0, b) = b: no constraint yet
            letter_blocks[axis.letter] = new = gcd(old, min(block, size))
            changed |= new != old
        elif axis.op == "+":
            block = gcd(block, *(part.size(sizes) for part in axis.parts[:-1]))
            for part in axis.parts:
                spread(part, block)
        elif axis.parts:
            outer, inner = axis.parts[0], Axis(op="*", parts=axis.parts[1:])
            inner_size = inner.size(sizes)
            covers = block % inner_size == 0
            spread(outer, block // inner_size if covers else 1)
            spread(inner, inner_size if covers else gcd(block, inner_size))

    def block_of(axis: Axis) -> int:
        """The block that the blocks of an axis' letters amount to."""
        if not axis.op:
            return letter_blocks.get(axis.letter) or axis.size(sizes)
        blocks = [block_of(part) for part in axis.parts]
        part_sizes = [part.size(sizes) for part in axis.parts]
        if axis.op == "+":
            block = gcd(*blocks[:-1], *part_sizes[:-1])
            # The last part may be one short block: nothing follows that it could straddle.
            return block if blocks[-1] == part_sizes[-1] <= block else gcd(block, blocks[-1])
        block = inner = 1
        for part_block, part_size in zip(reversed(blocks), reversed(part_sizes), strict=True):
            if block != inner:
                break
            block, inner = block * part_block, inner * part_size
        return block

    for tensor, tensor_blocks in zip(layout.src, blocks, strict=True):
        for axis, block in zip(tensor, tensor_blocks, strict=True):
            spread(axis, block)
    while changed:
        changed = False
        for tensor in layout.src + layout.dst:
            for axis in tensor:
                spread(axis, block_of(axis))

    # A letter may have no value at all, such as the experts' layers of a model without experts.
    letter_blocks = {letter: letter_blocks.get(letter) or sizes[letter] or 1 for letter in sizes}
    scale_sizes = {letter: -(-sizes[letter] // block) for letter, block in letter_blocks.items()}
    src_blocks = [[block_of(axis) for axis in tensor] for tensor in layout.src]
    shapes = layout.src_shapes(sizes)
    return ScaleLayout(
        layout=layout,
        sizes=scale_sizes,
        src_shapes=tuple(
            tuple(-(-n // b) for n, b in zip(s, bs, strict=True)) for s, bs in zip(shapes, blocks, strict=True)
        ),
        refine=tuple(
            tuple(b // g for b, g in zip(bs, gs, strict=True)) for bs, gs in zip(blocks, src_blocks, strict=True)
        ),
        dst_blocks=tuple(tuple(block_of(axis) for axis in tensor) for tensor in layout.dst),
    )
