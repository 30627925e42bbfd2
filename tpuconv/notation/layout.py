"""Layouts: how the axes of checkpoint tensors become the axes of parameters, written in letters and words.

    V D -> D V                              a transpose
    (N H) D -> D N H                        a product of axes, split: q_proj becomes (D, heads, head dimension)
    (N (P + H)) C -> C N P, C N H           a concatenation split into two parameters
    M D -> E D M                            experts stacked; E is an index in the tensor's name
    E (M (1 + 1)) D -> E D M, E D M         two matrices with alternating rows

A layout is an invertible rearrangement: swapping its sides gives the inverse. A letter has the same meaning everywhere
(`tpuconv.notation.letters`): in a layout, in the einsum of a layer, in a parameter's shape and in its sharding. The
words of a family stand in layouts as letters do, separated by blanks; "letter" means both below.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from math import gcd, prod
from typing import Any

import numpy as np

from tpuconv.errors import LayoutError
from tpuconv.notation.arrays import NUMPY, ArrayModule
from tpuconv.notation.letters import is_name

UNIT = "1"
"""An axis of size 1, which may be left out."""

Sizes = Mapping[str, int]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis: a letter (`op` is ""), a product `(N H)` (`op` is "*", outermost part first) or a concatenation `(P +
    R)` (`op` is "+")."""

    letter: str = ""
    op: str = ""
    parts: "tuple[Axis, ...]" = ()

    def size(self, sizes: Sizes) -> int:
        """Returns the number of elements, given the size of each letter."""
        if not self.op:
            return 1 if self.letter == UNIT else sizes[self.letter]
        part_sizes = (part.size(sizes) for part in self.parts)
        return prod(part_sizes) if self.op == "*" else sum(part_sizes)

    def letters(self) -> Iterator[str]:
        """Yields the letters of the axis in reading order."""
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
    """Returns the axes as text: "(N H) D"."""
    return " ".join(map(str, tensor))


def parse_axes(text: str) -> Axes:
    """Returns the inverse of `format_axes`.

    Raises:
        LayoutError: the text is malformed.
    """
    (tensor,) = _parse_side(text, text)
    return tensor


@dataclass(frozen=True)
class Layout:
    """The axes of the source tensors and of the target tensors, with the same letters on both sides.

    Raises:
        LayoutError: the sides have different letters.
    """

    src: tuple[Axes, ...]
    dst: tuple[Axes, ...]

    def __post_init__(self) -> None:
        atoms = [sorted(sorted(atom) for t in side for atom in _atom_letters(t)) for side in (self.src, self.dst)]
        if atoms[0] != atoms[1]:
            raise LayoutError(f"the sides of '{self}' have different letters: {atoms[0]} and {atoms[1]}")

    @classmethod
    @cache
    def parse(cls, text: str, stack: tuple[str, ...] = ()) -> "Layout":
        """Returns the layout that `src -> dst` describes, tensors separated by commas. Without an arrow both sides are
        the same. The letters of `stack` are prepended to each source tensor, outermost first.

        Raises:
            LayoutError: the text is malformed.
        """
        left, arrow, right = text.partition("->")
        front = tuple(map(Axis, stack))
        src = tuple(front + tensor for tensor in _parse_side(left, text))
        return cls(src, _parse_side(right, text) if arrow else src)

    def letters(self) -> Iterator[str]:
        """Yields the letters of the source tensors in reading order."""
        return (x for tensor in self.src for axis in tensor for x in axis.letters() if x != UNIT)

    @cached_property
    def inverse(self) -> "Layout":
        """The layout with its sides swapped."""
        return Layout(self.dst, self.src)

    def src_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Returns the shape of each source tensor."""
        return tuple(tuple(axis.size(sizes) for axis in t) for t in self.src)

    def dst_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        """Returns the shape of each target tensor."""
        return self.inverse.src_shapes(sizes)

    def __call__(self, tensors: Sequence[Any], sizes: Sizes, arrays: ArrayModule = NUMPY) -> list[Any]:
        """Returns the target tensors, as views of the source tensors if numpy can express them so. `arrays` is the
        module of the tensors.

        Raises:
            LayoutError: a source tensor has another shape.
        """
        atoms: list[_Atom] = []
        for array, axes, shape in zip(tensors, self.src, self.src_shapes(sizes), strict=True):
            if array.shape != shape:
                raise LayoutError(f"a tensor has shape {array.shape}, '{format_axes(axes)}' needs {shape}")
            atoms += _split(array, axes, sizes)
        # Several atoms may have the same letters, as in (F + F). `_join` takes them in reading order.
        return [_join(atoms, axes, arrays) for axes in self.dst]

    def __str__(self) -> str:
        src, dst = (", ".join(map(format_axes, side)) for side in (self.src, self.dst))
        return src if src == dst else f"{src} -> {dst}"


def _parse_side(side: str, text: str) -> tuple[Axes, ...]:
    tokens = re.findall(r"\w+|\S", side)

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
            elif token == UNIT or is_name(token):
                parts.append(Axis(token))
            else:
                raise LayoutError(f"'{token}' in '{text}' is neither a letter of tpuconv.notation.letters nor a word")
        if plus and plus != len(parts) - 1:
            raise LayoutError(f"'{text}' mixes a product and a concatenation in one bracket")
        return Axis(op="+" if plus else "*", parts=tuple(parts))

    tensors = [axes()]
    while tokens:
        if tokens.pop(0) != ",":
            raise LayoutError(f"unbalanced brackets in '{text}'")
        tensors.append(axes())
    if any(t.op == "+" for t in tensors):
        raise LayoutError(f"a concatenation in '{text}' is not in brackets")
    return tuple(t.parts for t in tensors)


def _first_composite(axes: Axes) -> int | None:
    return next((i for i, axis in enumerate(axes) if axis.op), None)


def _atom_letters(axes: Axes) -> list[tuple[str, ...]]:
    """Returns the letters of each atom that `_split` makes of a tensor."""
    i = _first_composite(axes)
    if i is None:
        return [tuple(axis.letter for axis in axes if axis.letter != UNIT)]
    if axes[i].op == "*":
        return _atom_letters(axes[:i] + axes[i].parts + axes[i + 1 :])
    return [atom for part in axes[i].parts for atom in _atom_letters(axes[:i] + (part,) + axes[i + 1 :])]


_Atom = tuple[tuple[str, ...], Any]
"""A view of a tensor whose axes are letters, and these letters."""


def _split(array: Any, axes: Axes, sizes: Sizes) -> list[_Atom]:
    """Splits a tensor into atoms: views whose axes are letters, without products and concatenations. In reading order,
    each with its letters."""
    i = _first_composite(axes)
    if i is None:
        units = tuple(n for n, axis in enumerate(axes) if axis.letter == UNIT)
        return [(tuple(axis.letter for axis in axes if axis.letter != UNIT), array.squeeze(units))]
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


def _join(atoms: list[_Atom], axes: Axes, arrays: ArrayModule) -> Any:
    """Returns the inverse of `_split`: removes the atoms that `axes` needs from the list, and returns the tensor."""
    i = _first_composite(axes)
    if i is None:
        letters = [axis.letter for axis in axes if axis.letter != UNIT]
        index = next(n for n, (atom, _) in enumerate(atoms) if sorted(atom) == sorted(letters))
        atom, array = atoms.pop(index)
        array = array.transpose([atom.index(letter) for letter in letters])
        return arrays.expand_dims(array, tuple(n for n, axis in enumerate(axes) if axis.letter == UNIT))
    if axes[i].op == "*":
        array = _join(atoms, axes[:i] + axes[i].parts + axes[i + 1 :], arrays)
        return array.reshape(array.shape[:i] + (-1,) + array.shape[i + len(axes[i].parts) :])
    return arrays.concatenate([_join(atoms, axes[:i] + (p,) + axes[i + 1 :], arrays) for p in axes[i].parts], i)


# -- slices: the source elements that a range of one letter is made of ------------------------------------------------


def lead(axis: Axis) -> str:
    """Returns the letter whose ranges are contiguous ranges of the axis: the axis' own letter, or the outermost one of
    a product; "" for a concatenation, which has none."""
    while axis.op == "*":
        axis = axis.parts[0]
    return axis.letter


def sliceable(layout: Layout, letter: str) -> bool:
    """Returns whether a range of `letter` is a contiguous range of one axis in each target tensor, and every part of
    every source tensor has the letter."""
    once = all([*(name for axis in t for name in axis.letters())].count(letter) == 1 for t in layout.dst)
    everywhere = all(letter in atom for t in layout.src for atom in _atom_letters(t))
    return once and everywhere and all(letter in map(lead, t) for t in layout.dst)


Ranges = Mapping[str, tuple[int, int]]
"""The range [start, stop) of each letter that is sliced."""


def cut_sizes(sizes: Sizes, ranges: Ranges) -> dict[str, int]:
    """Returns the sizes after slicing each letter of `ranges` to its range."""
    return {**sizes, **{letter: stop - start for letter, (start, stop) in ranges.items()}}


def runs(tensor: Axes, sizes: Sizes, ranges: Ranges) -> list[tuple[int, int]]:
    """Returns the ranges [start, stop) of flat (row-major) element numbers of a tensor that are in all `ranges`.

    Concatenated, these elements are the tensor with the sizes `cut_sizes(sizes, ranges)` in row-major order, so the
    same layout applies to them.
    """
    return _axis_runs(Axis(op="*", parts=tensor), sizes, ranges)[1]


def _axis_runs(axis: Axis, sizes: Sizes, ranges: Ranges) -> tuple[int, list[tuple[int, int]]]:
    """Returns the size of an axis, and the ranges of its elements that are in all `ranges`."""
    if not axis.op:
        size = axis.size(sizes)
        return size, [ranges.get(axis.letter, (0, size))]
    parts = [_axis_runs(part, sizes, ranges) for part in axis.parts]
    if axis.op == "+":
        starts = accumulate((size for size, _ in parts), initial=0)
        return axis.size(sizes), _merged(
            [(at + a, at + b) for at, (_, part_runs) in zip(starts, parts, strict=False) for a, b in part_runs]
        )
    total, inner = 1, [(0, 1)]
    for size, part_runs in reversed(parts):
        if inner == [(0, total)]:
            inner = [(a * total, b * total) for a, b in part_runs]
        else:
            inner = [(i * total + a, i * total + b) for lo, hi in part_runs for i in range(lo, hi) for a, b in inner]
        total *= size
    return total, _merged(inner)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the ranges, adjacent ones joined."""
    out: list[tuple[int, int]] = []
    for a, b in ranges:
        if out and out[-1][1] == a:
            out[-1] = (out[-1][0], b)
        else:
            out.append((a, b))
    return out


# -- block scales: the layout of the scales of a quantized tensor -----------------------------------------------------


@dataclass(frozen=True)
class ScaleLayout:
    """The rearrangement of block scales when a layout rearranges their tensors. Nothing is requantized.

    Attributes:
        layout: the layout of tensors and scales.
        sizes: size of each letter in a tensor of scales.
        src_shapes: shape of the scales of each source tensor.
        refine: for each axis of each source tensor, how often its scales are repeated before the layout is applied; 1
            if its blocks remain blocks. Repeated scales describe smaller blocks with the same values.
        dst_blocks: block size of each axis of each target tensor.
    """

    layout: Layout
    sizes: dict[str, int]
    src_shapes: tuple[Shape, ...]
    refine: tuple[Shape, ...]
    dst_blocks: tuple[Shape, ...]

    def __call__(self, scales: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the scales of the target tensors.

        Raises:
            LayoutError: scales have another shape than `src_shapes`.
        """
        refined = []
        wanted = self.layout.src_shapes(self.sizes)
        for scale, shape, repeats, want in zip(scales, self.src_shapes, self.refine, wanted, strict=True):
            if scale.shape != shape:
                raise LayoutError(f"scales have shape {scale.shape}, their blocks need {shape}")
            repeated = scale
            for axis, n in enumerate(repeats):
                if n > 1:
                    repeated = np.repeat(repeated, n, axis=axis)
            refined.append(repeated[tuple(slice(n) for n in want)])
        return self.layout(refined, self.sizes)


def scale_layout(layout: Layout, sizes: Sizes, blocks: Sequence[Sequence[int]]) -> ScaleLayout:
    """Returns the layout of block scales, given the block size of each axis of each source tensor.

    Scale i of an axis of n elements with blocks of b covers the elements [i b, min((i+1) b, n)). Blocks that would be
    split by the layout are refined: to the greatest common divisor of all block borders that meet in an axis.
    """
    letter_blocks: dict[str, int] = {}
    changed = True

    def spread(axis: Axis, block: int) -> None:
        """Refines the blocks of an axis' letters so that they divide a block of the axis."""
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
        """Returns the block of an axis that results from the blocks of its letters."""
        if not axis.op:
            return letter_blocks.get(axis.letter) or axis.size(sizes)
        blocks = [block_of(part) for part in axis.parts]
        part_sizes = [part.size(sizes) for part in axis.parts]
        if axis.op == "+":
            block = gcd(*blocks[:-1], *part_sizes[:-1])
            # The last part may be one short block, since no part follows it.
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

    # A letter may have size 0, such as the layers with experts of a model without experts.
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
