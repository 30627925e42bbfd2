"""Pairs of low-rank matrices (LoRA, arXiv:2106.09685) on the rows of a table: a change a b of a parameter becomes the
change B A of the released matrix that the parameter is made of, and back.

Of a row, the letters of the released matrix's inputs are I, those that stack matrices (layers, experts) are S, and all
others are outputs, O. Then with the rank r

    a [S, I, r], b [S, r, O]     as trainers have them (Qwix's `LoraProvider`), the axes as in the parameter
    A [S, r, in], B [S, out, r]  as PEFT has them

`a` follows the row's layout without O, `b` without I. Where a row joins several matrices along their outputs, the
result has the ranks of all: A is [A1; A2; ...], and B is block-diagonal. Where all A are equal, as after a matrix was
divided, the rank stays and the B are added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np

from tpuconv.errors import LayoutError
from tpuconv.notation.arithmetic import Times
from tpuconv.notation.layout import Axes, Axis, Layout, Shape
from tpuconv.notation.letters import Word, declare
from tpuconv.notation.table import EXPERTS, Binding

PAIR_ENDS = ("_lora_a", "_lora_b")
"""The ends of the names of the two arrays of a pair, after the name of the parameter that they change."""
RANK = "rank"
declare(**{RANK: Word("rank of a pair of low-rank matrices")})
_RANK = Axis(RANK)


@dataclass(frozen=True)
class Pair:
    """The change `scale` a b of a parameter, or `scale` B A of a released matrix.

    Attributes:
        a: [S, I, r] of a parameter, [S, r, in] of a matrix.
        b: [S, r, O] of a parameter, [S, out, r] of a matrix.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float

    @property
    def transposed(self) -> "Pair":
        """The pair of the transposed matrix."""
        return Pair(np.swapaxes(self.b, -1, -2), np.swapaxes(self.a, -1, -2), self.scale)


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A matrix of a pair, in the axes in which a trainer stores it."""

    values: np.ndarray
    axes: Axes


@dataclass(frozen=True)
class PairRow:
    """The layouts of the pairs of a row.

    Args:
        binding: the row.

    Raises:
        LayoutError: the row has no matrices, or moves inputs to outputs.
    """

    binding: Binding

    def __post_init__(self) -> None:
        is_of_text = not self.binding.row.part  # the letter is another one beside it
        for axes, stack in zip(self.layout.src, self.binding.src, strict=True):
            if len(axes) - stack.depth < 2 or axes[stack.depth : -2] not in ((), (Axis(EXPERTS),)[:is_of_text]):
                raise LayoutError(f"'{self.layout}' has a tensor that is no matrix")
            if is_of_text and any(axis.op and EXPERTS in axis.letters() for axis in axes[-2:]):
                raise LayoutError(f"'{self.layout}' has all experts in one matrix, whose change has more ranks than r")
        for name in self.parameters:
            _ = self._a_layout(name)
        _ = self._b_layout

    @property
    def layout(self) -> Layout:
        """The layout of the row."""
        return self.binding.layout

    @cached_property
    def parameters(self) -> dict[str, Axes]:
        """The axes of each parameter."""
        pairs = zip(self.binding.dst, self.layout.dst, strict=True)
        return {stack.names[0]: axes for stack, axes in pairs}

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The letters S, outermost first."""
        return tuple(axis.letter for axis in self.layout.src[0][:-2])

    @property
    def is_of_experts(self) -> bool:
        """True if a released tensor has the matrices of all experts."""
        return self.binding.src[0].depth < len(self.shared)

    @cached_property
    def has_inputs_first(self) -> bool:
        """True if the released matrices are [in, out], not [out, in]."""
        if self.binding.row.input_first:
            return True
        if not self.is_of_experts:
            return False
        # Matrices of experts in one tensor lie either way. A parameter has the inputs first.
        first = next(axis for axis in self.layout.dst[0] if axis.letter not in self.shared)
        return not set(first.letters()).isdisjoint(self.layout.src[0][-2].letters())

    def _core(self, axes: Axes) -> tuple[Axis, Axis]:
        """The axes of a released matrix: outputs, inputs."""
        out, inputs = axes[-2:]
        return (inputs, out) if self.has_inputs_first else (out, inputs)

    @cached_property
    def _inputs(self) -> Axis:
        """The axis of the inputs, the same in each released matrix."""
        found = {self._core(axes)[1] for axes in self.layout.src}
        if len(found) > 1:
            raise LayoutError(f"'{self.layout}' has matrices of different inputs")
        return found.pop()

    def of_inputs(self, name: str) -> Axes:
        """The axes of a parameter that its inputs have."""
        letters = set(self._inputs.letters())
        return tuple(axis for axis in self._own(name) if letters.issuperset(axis.letters()))

    def of_outputs(self, name: str) -> Axes:
        """The axes of a parameter that its outputs have."""
        letters = set(self._inputs.letters())
        return tuple(axis for axis in self._own(name) if not letters.issuperset(axis.letters()))

    def _own(self, name: str) -> Axes:
        return tuple(axis for axis in self.parameters[name] if axis.op or axis.letter not in self.shared)

    @property
    def _stack(self) -> Axes:
        return tuple(map(Axis, self.shared))

    def _a_layout(self, name: str) -> Layout:
        stack = self._stack
        return Layout(((*stack, *self.of_inputs(name), _RANK),), ((*stack, _RANK, self._inputs),))

    @cached_property
    def _b_layout(self) -> Layout:
        stack = self._stack
        src = tuple((*stack, _RANK, *self.of_outputs(name)) for name in self.parameters)
        dst = tuple((*stack, self._core(axes)[0], _RANK) for axes in self.layout.src)
        return Layout(src, dst)

    def _sizes(self, rank: int) -> dict[str, int]:
        return {**self.binding.sizes, RANK: rank}

    # -- as a trainer stores them -------------------------------------------------------------------------------------

    def arranged(self, name: str, a: np.ndarray, b: np.ndarray, alpha: float) -> Pair:
        """The pair of a parameter, with the scale alpha / r, from the arrays of a trainer, which may have the axes of
        inputs, or of outputs, as one, and S in front or where the parameter has it.

        Raises:
            LayoutError: they are no pair of the parameter, by their shapes.
        """
        sizes = self.binding.sizes
        inputs = tuple(axis.size(sizes) for axis in self.of_inputs(name))
        outputs = tuple(axis.size(sizes) for axis in self.of_outputs(name))
        known = prod(sizes[x] for x in self.shared) * prod(inputs)
        rank = a.size // known if known else 0
        if not rank or a.size != rank * known:
            raise LayoutError(f"a of shape {list(a.shape)} has no rank: inputs are {list(inputs)}")
        return Pair(
            self._canonical(name, a, [(*inputs, rank), (prod(inputs), rank)]),
            self._canonical(name, b, [(rank, *outputs), (rank, prod(outputs))]),
            alpha / rank,
        )

    def _canonical(self, name: str, array: np.ndarray, cores: Sequence[Shape]) -> np.ndarray:
        """[S, *cores[0]] from an array of one of these shapes without S."""
        sizes, places = self.binding.sizes, enumerate(self.parameters[name])
        stacked = {i: axis.letter for i, axis in places if axis.letter in self.shared}
        for core in cores:
            for is_in_front in (False, True):  # where the parameter has the axis, as scanned layers have it
                letters = [""] * len(core)
                for n, (i, letter) in enumerate(stacked.items()):
                    letters.insert(n if is_in_front else min(i, len(letters)), letter)
                rest = iter(core)
                if array.shape == tuple(sizes[x] if x else next(rest) for x in letters):
                    order = [*map(letters.index, self.shared), *(i for i, x in enumerate(letters) if not x)]
                    return array.transpose(order).reshape(*(sizes[x] for x in self.shared), *cores[0])
        raise LayoutError(f"{list(array.shape)} is not the shape of a pair, which is {list(cores[0])} without stacks")

    def padded(self, pair: Pair, rank: int) -> Pair:
        """The pair of a parameter with ranks of zeros added, so that it has so many."""

        def with_zeros(array: np.ndarray, axis: int) -> np.ndarray:
            widths = [(0, 0)] * array.ndim
            widths[axis] = (0, rank - array.shape[axis])
            return np.pad(array, widths)

        return replace(pair, a=with_zeros(pair.a, -1), b=with_zeros(pair.b, len(self.shared)))

    def stored(self, name: str, pair: Pair, alpha: float, *, flat: bool) -> tuple[StoredMatrix, StoredMatrix]:
        """The arrays of a parameter's pair as a trainer has them that scales by alpha / r: with S where the parameter
        has it, and all axes of inputs, or of outputs, as one if they are `flat`. What differs in scale is multiplied
        into b."""
        rank = pair.a.shape[-1]
        b = _times(pair.b, pair.scale * rank / alpha)
        word = f"{RANK}_{rank}"
        declare(**{word: Word(f"{rank} ranks of a pair of low-rank matrices")})

        def arranged(array: np.ndarray, axes: Axes) -> StoredMatrix:
            letters = [axis.letter if not axis.op else "" for axis in self.parameters[name]]
            places = {x: min(i, len(axes)) for i, x in enumerate(letters) if x in self.shared}
            stacked = list(axes)
            for letter, i in places.items():
                stacked.insert(i, Axis(letter))
            order = [self.shared.index(x.letter) if x.letter in places else None for x in stacked]
            rest = iter(range(len(self.shared), len(self.shared) + len(axes)))
            values = array.reshape(
                *array.shape[: len(self.shared)], *(x.size(self._sizes(rank) | {word: rank}) for x in axes)
            )
            return StoredMatrix(values.transpose([next(rest) if i is None else i for i in order]), tuple(stacked))

        def joined(axes: Axes) -> Axes:
            return (Axis(op="*", parts=axes),) if flat and len(axes) > 1 else axes

        return (
            arranged(pair.a, (*joined(self.of_inputs(name)), Axis(word))),
            arranged(b, (Axis(word), *joined(self.of_outputs(name)))),
        )

    def change(self, name: str, pair: Pair, box: Sequence[slice]) -> np.ndarray:
        """A box of the change of a parameter, in float32."""
        axes, own = self.parameters[name], dict(zip(self.parameters[name], box, strict=True))
        stack = tuple(own[axis] for axis in self._stack)
        inputs, outputs = self.of_inputs(name), self.of_outputs(name)
        a = pair.a[(*stack, *(own[axis] for axis in inputs))].astype(np.float32)
        b = pair.b[(*stack, slice(None), *(own[axis] for axis in outputs))].astype(np.float32)
        depth = len(stack)
        shape = (*a.shape[:depth], *a.shape[depth:-1], *b.shape[depth + 1 :])
        rows, columns = a.reshape(*a.shape[:depth], -1, a.shape[-1]), b.reshape(*b.shape[: depth + 1], -1)
        product = (rows @ columns).reshape(shape) * np.float32(pair.scale)
        places = (*self._stack, *inputs, *outputs)
        return product.transpose([places.index(axis) for axis in axes])

    # -- to released matrices and back --------------------------------------------------------------------------------

    def released(self, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
        """The pairs of the released matrices, by name, from the pairs of parameters, some of which may have none."""
        found: dict[int, list[Pair]] = {}
        for name, pair in pairs.items():
            rank = pair.a.shape[-1]
            (a,) = self._a_layout(name)([pair.a], self._sizes(rank))
            change = self.binding.arithmetic.get(name)
            b = change.undo(pair.b, self.binding.sizes) if isinstance(change, Times) else pair.b  # a term is the base's
            for i, own in self._spread(name, b):
                found.setdefault(i, []).append(Pair(a, own, pair.scale))
        whole = {i: _joined(parts, -2, -1) for i, parts in found.items()}
        if any(np.any(joined.b) for joined in whole.values()):  # before a step of training B is zero in all
            whole = {i: joined for i, joined in whole.items() if np.any(joined.b)}  # an adapter may change one alone
        out: dict[str, Pair] = {}
        for i, joined in whole.items():
            stack = self.binding.src[i]
            matrices = prod(self.binding.sizes[x] for x in self.shared[: stack.depth])
            a, b = (x.reshape(matrices, *x.shape[stack.depth :]) for x in (joined.a, joined.b))
            for k, name in enumerate(stack.names):
                matrix = Pair(a[k], b[k], joined.scale) if stack.depth else joined
                out[name] = _without_zeros(matrix) if len(self.layout.src) > 1 else matrix
        return out

    def of_parameters(self, pairs: Mapping[str, Pair]) -> dict[str, Pair]:
        """The pairs of parameters, by name, from the pairs of released matrices, some of which may have none."""
        found: dict[str, list[Pair]] = {}
        for i, stack in enumerate(self.binding.src):
            own = [pairs.get(name) for name in stack.names]
            if not any(own):
                continue
            pair = self._stacked(own, stack.depth)
            sizes = self._sizes(pair.b.shape[-1])
            shapes = self._b_layout.dst_shapes(sizes)
            inverse = self._b_layout.inverse
            marks = inverse([np.full(shape, n == i) for n, shape in enumerate(shapes)], sizes)
            b_of = inverse(
                [pair.b if n == i else np.zeros(shape, pair.b.dtype) for n, shape in enumerate(shapes)], sizes
            )
            for name, mark, b in zip(self.parameters, marks, b_of, strict=True):
                if mark.any():
                    (a,) = self._a_layout(name).inverse([pair.a], sizes)
                    found.setdefault(name, []).append(Pair(a, b, pair.scale))
        out = {name: _joined(parts, -1, len(self.shared)) for name, parts in found.items()}
        for name, change in self.binding.arithmetic.items():
            if name in out and isinstance(change, Times):
                out[name] = replace(out[name], b=change.apply(out[name].b, self.binding.sizes))
        return out

    def _stacked(self, pairs: Sequence[Pair | None], depth: int) -> Pair:
        """One pair [S, ...] of the pairs of single matrices. All get the largest rank, and the first one's scale."""
        first = next(pair for pair in pairs if pair is not None)
        if not depth:
            return first
        rank = max(pair.b.shape[-1] for pair in pairs if pair is not None)
        a = np.zeros((len(pairs), *first.a.shape[:-2], rank, first.a.shape[-1]), first.a.dtype)
        b = np.zeros((len(pairs), *first.b.shape[:-1], rank), first.b.dtype)
        for i, pair in enumerate(pairs):
            if pair is not None:
                a[i, ..., : pair.a.shape[-2], :] = pair.a
                b[i, ..., : pair.b.shape[-1]] = _times(pair.b, pair.scale / first.scale)
        stack = tuple(self.binding.sizes[x] for x in self.shared[:depth])
        return Pair(a.reshape(*stack, *a.shape[1:]), b.reshape(*stack, *b.shape[1:]), first.scale)

    def _spread(self, name: str, b: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """The number and the B of each released matrix that the b of one parameter changes."""

        def rearranged(fill: np.ndarray, rank: int) -> list[np.ndarray]:
            sizes = self._sizes(rank)
            shapes = self._b_layout.src_shapes(sizes)
            arrays = [np.zeros(shape, fill.dtype) for shape in shapes]
            number = list(self.parameters).index(name)
            arrays[number] = fill.reshape(shapes[number])
            return self._b_layout(arrays, sizes)

        rank = b.shape[len(self.shared)]
        marks = rearranged(np.ones_like(b[(slice(None),) * len(self.shared) + (slice(1),)], bool), 1)
        return [(i, own) for i, own in enumerate(rearranged(b, rank)) if marks[i].any()]


def _joined(parts: Sequence[Pair], a_axis: int, b_axis: int) -> Pair:
    """The sum of changes of one matrix, whose ranks are on these axes of a and b. All get the first one's scale."""
    first, *others = parts
    if not others:
        return first
    same = all(part.a.shape == first.a.shape and np.array_equal(part.a, first.a) for part in others)
    scaled = [first.b, *(_times(part.b, part.scale / first.scale) for part in others)]
    if same:  # each changes rows of its own
        return replace(first, b=sum(scaled[1:], start=scaled[0]))
    return Pair(np.concatenate([part.a for part in parts], a_axis), np.concatenate(scaled, b_axis), first.scale)


def _without_zeros(pair: Pair) -> Pair:
    """The pair without the ranks whose column of B is zero: a part of joined matrices has such ones for the others. The
    scale is divided by as much as the rank is, and B multiplied, if that is exact: so what was joined comes back as it
    was."""
    own = np.any(pair.b, axis=tuple(range(pair.b.ndim - 1)))
    kept, rank = int(np.count_nonzero(own)), pair.b.shape[-1]
    if kept in (0, rank):
        return pair
    a, b = np.compress(own, pair.a, axis=-2), np.compress(own, pair.b, axis=-1)
    factor = rank / kept
    is_exact = factor.is_integer() and (int(factor) & (int(factor) - 1)) == 0
    return Pair(a, _times(b, 1 / factor), pair.scale * factor) if is_exact else Pair(a, b, pair.scale)


def _times(b: np.ndarray, factor: float) -> np.ndarray:
    """The product, rounded once."""
    return b if factor == 1 else (b.astype(np.float32) * np.float32(factor)).astype(b.dtype)
