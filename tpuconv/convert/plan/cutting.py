"""Dividing the work: arrays into shards and chunks, their sources into slabs, and slabs into units."""

from collections.abc import Iterator, Mapping
from itertools import product
from math import gcd, lcm, prod
from typing import Any

import numpy as np

from tpuconv.checkpoint.manifest import element_bits
from tpuconv.convert.plan import sizes
from tpuconv.convert.plan.options import Options
from tpuconv.convert.plan.quantization import EncodedComponent, Encoder
from tpuconv.convert.plan.types import FLOAT_DTYPES, OutputArray
from tpuconv.convert.plan.units import Slab
from tpuconv.encodings.decode import Tensor
from tpuconv.errors import UnsupportedConfig
from tpuconv.notation.layout import Axes, Shape, format_axes, lead, sliceable
from tpuconv.notation.letters import sharded_as
from tpuconv.notation.sharding import MESH_AXES
from tpuconv.notation.table import EXPERTS, LAYERS, PERIODS, Binding
from tpuconv.targets.target import OWN, Target

BYTE_BITS = 8


def cut_binding(
    tensors: Mapping[str, Tensor],
    binding: Binding,
    options: Options,
    encoders: Mapping[str, Encoder],
    target: Target = OWN,
) -> tuple[list[OutputArray], list[Slab]]:
    """Divides the work of a binding.

    Args:
        tensors: of the source.
        binding: a row of the table.
        options: dtype and compression.
        encoders: of the parameters that are quantized.
        target: what the output is for; it names the parts of quantized parameters.

    Returns:
        The arrays that it makes, and its slabs: boxes of about SLAB_BYTES at most. They are cut along the letters that
        are outermost in the source first, so that it is read in long runs. What is encoded together stays together.
    """
    layout, lengths = binding.layout, binding.sizes
    letters = list(
        dict.fromkeys(x for axes in layout.src for axis in axes for x in axis.letters() if sliceable(layout, x))
    )
    first = tensors[binding.src[0].names[0]]
    is_fixed = options.dtype == "auto" or binding.row.buffer or first.passthrough
    values = first.dtype if is_fixed else FLOAT_DTYPES[options.dtype]
    itemsize = max(values.itemsize, first.dtype.itemsize)
    cuts = [
        _Cut(axes, shape, encoders.get(stack.names[0]), values, letters, options)
        for axes, shape, stack in zip(layout.dst, layout.dst_shapes(lengths), binding.dst, strict=True)
    ]
    steps: dict[str, int] = {}

    def nbytes() -> int:
        return sum(map(prod, layout.src_shapes({**lengths, **steps}))) * itemsize

    for letter in letters:
        if nbytes() <= sizes.SLAB_BYTES:
            break
        # The smallest range of the letter that is a whole number of chunks and blocks in every target, times what fits.
        least = lcm(*(cut.least(letter, lengths[letter]) for cut in cuts))
        if least < lengths[letter]:
            steps[letter] = least
            steps[letter] = min(-(-lengths[letter] // least), max(1, sizes.SLAB_BYTES // nbytes())) * least

    sources = tuple(name for stack in binding.src for name in stack.names)
    arrays = [
        array
        for cut, stack in zip(cuts, binding.dst, strict=True)
        for array in cut.arrays(stack.names[0], lengths, steps, sources, binding.row.buffer, target)
    ]
    ranges = [[(x, (a, min(a + step, lengths[x]))) for a in range(0, lengths[x], step)] for x, step in steps.items()]
    return arrays, [Slab(binding, dict(box), values) for box in product(*ranges)]


class _Cut:
    """A parameter that is being divided: the first letters of its axes, the shape of its chunks, and its blocks."""

    def __init__(
        self,
        axes: Axes,
        shape: Shape,
        encoder: Encoder | None,
        dtype: np.dtype[Any],
        letters: list[str],
        options: Options,
    ) -> None:
        self.axes, self.shape, self.options = format_axes(axes), shape, options
        self.leads = [lead(axis) for axis in axes]
        ones = (1,) * len(shape)
        self.parts = encoder.parts if encoder else (EncodedComponent("", dtype, ones, own=True),)
        self.blocks = encoder.blocks if encoder else ones
        itemsize = next(part.dtype.itemsize for part in self.parts if part.own)
        self.chunks = _chunk_shape(shape, self.leads, letters, itemsize)

    def least(self, letter: str, size: int) -> int:
        """Returns the smallest range of a letter that is a whole number of chunks and blocks."""
        axis = self.leads.index(letter)
        inner = self.shape[axis] // size
        return lcm(self.chunks[axis], self.blocks[axis], inner) // inner

    def arrays(
        self,
        name: str,
        lengths: Mapping[str, int],
        steps: Mapping[str, int],
        sources: tuple[str, ...],
        buffer: bool,
        target: Target,
    ) -> Iterator[OutputArray]:
        slabs = tuple(
            n // lengths[x] * steps[x] if x in steps else n for x, n in zip(self.leads, self.shape, strict=True)
        )
        for part in self.parts:
            shape = tuple(n // b for n, b in zip(self.shape, part.blocks, strict=True))
            slab = tuple(n // b for n, b in zip(slabs, part.blocks, strict=True))
            chunks = self.chunks if part.own else slab
            shards = tuple(-(-n // c) * c for n, c in zip(slab, chunks, strict=True))
            if self.options.pathways:
                chunks = shards = _joined(chunks, shards, shape, self.leads, part.dtype.itemsize)
            full_name = target.part(name, part.suffix) if part.suffix else name
            is_buffer = buffer or not part.own
            array = OutputArray(
                shape,
                part.dtype,
                shards,
                chunks,
                full_name,
                self.axes,
                sources,
                is_buffer,
                compressed=self.options.compress or (part.bits or element_bits(part.dtype.name)) < BYTE_BITS,
                zarr2=self.options.pathways,
            )
            if target.squeezes_scales and part.suffix and not part.own:
                dropped = tuple(i for i, (n, b) in enumerate(zip(shape, part.blocks, strict=True)) if n == 1 < b)
                if any(b > 1 for i, b in enumerate(part.blocks) if i not in dropped) or not 0 < len(dropped) < len(
                    shape
                ):
                    raise UnsupportedConfig(
                        f"{target.name} has scales of whole channels, and the scales of {name} have the shape "
                        f"{list(shape)}",
                        hint='quantize without tile_size, or decode by `encoding="dequantize"`',
                    )
                array = array.squeezed(dropped)
            yield array


def _chunk_shape(shape: Shape, leads: list[str], letters: list[str], itemsize: int) -> Shape:
    """Returns the shape of an array's chunks. Stacked axes are cut first, then those that a mesh divides, eight ways
    unless the pieces become too small, then all others until a chunk is small enough."""
    order = sorted((i for i, x in enumerate(leads) if x in letters), key=lambda i: (_rank(leads[i]), i))
    counts = [1] * len(shape)

    def nbytes() -> int:
        return prod(-(-n // c) for n, c in zip(shape, counts, strict=True)) * itemsize

    for goal, enough in (
        (8, sizes.CHUNK_BYTES // 4),
        (64, sizes.CHUNK_BYTES),
        (max(shape, default=1), sizes.CHUNK_BYTES),
    ):
        for i in order:
            limit = shape[i] if leads[i] in (LAYERS, PERIODS, EXPERTS) else min(goal, shape[i])
            while counts[i] < limit and nbytes() > enough:
                counts[i] = _divisor(shape[i], 2 * counts[i])
    return tuple(-(-n // c) for n, c in zip(shape, counts, strict=True))


def _joined(chunks: Shape, shards: Shape, shape: Shape, leads: list[str], itemsize: int) -> Shape:
    """Returns the shape of the files for Pathways: chunks of a shard, joined up to a quarter of a slab. Axes of tensor
    parallelism are joined first, since MaxText rather divides others; stacked ones last, since they are read one by
    one."""
    joined = list(chunks)
    for i in sorted(range(len(leads)), key=lambda i: (_rank(leads[i]) < TENSOR, _rank(leads[i]), i)):
        count = gcd(shards[i] // chunks[i], -(-shape[i] // chunks[i]))  # files fill up the shards and the array
        fitting = sizes.SLAB_BYTES // 4 // (prod(joined) * itemsize)
        joined[i] *= max((n for n in range(1, min(count, fitting) + 1) if count % n == 0), default=1)
    return tuple(joined)


TENSOR = 2
_RANKS = {letter: TENSOR if "tensor" in axes else 3 for letter, axes in MESH_AXES.items()}
_RANKS |= {LAYERS: 0, PERIODS: 0, EXPERTS: 1}
"""The order in which axes are cut: stacked axes, axes of tensor parallelism, other axes of a mesh."""


def _rank(letter: str) -> int:
    return _RANKS.get(sharded_as(letter), 4)


def _divisor(size: int, wanted: int) -> int:
    """Returns the smallest divisor of `size` from `wanted` to twice that; `wanted` if there is none (uneven chunks)."""
    return next((n for n in range(wanted, min(2 * wanted, size) + 1) if size % n == 0), min(wanted, size))
