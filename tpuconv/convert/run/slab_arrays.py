"""The arrays of slabs: their values are read, rearranged, and quantized where a rule says so."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np

from tpuconv.checkpoint import manifest
from tpuconv.convert.plan.quantization import Encoder
from tpuconv.convert.plan.types import OutputArray, Plan
from tpuconv.convert.plan.units import Buffers, Slab
from tpuconv.convert.run.calibrated import QVALUES, SCALES, VALUES, CalibratedValues
from tpuconv.convert.run.slabs import not_finite, read_slab
from tpuconv.encodings.casts import all_finite, check_cast
from tpuconv.errors import SourceError
from tpuconv.sources.reader import Reader
from tpuconv.storage.disk import page_buffer

MadeBox = tuple[OutputArray, tuple[slice, ...], np.ndarray]
"""An array, a box of it, and the values of the box: unsigned integers of the size of the elements."""


class SlabArrays:
    """Makes the arrays of slabs. One thread has one, with memory that is allocated once, since new memory costs more
    than the copy into it: for values, and for their bytes if they are stored in another form.

    Args:
        plan: of the slabs.
        need: the memory that they need.
        reader: of the source.
        calibrated: what a calibration found, if there was one.
    """

    def __init__(self, plan: Plan, need: Buffers, reader: Reader, calibrated: CalibratedValues | None = None):
        self.plan, self.reader, self.calibrated = plan, reader, calibrated
        self._values, self._raw = page_buffer(need.values), page_buffer(need.raw)

    def boxes(self, slab: Slab, statistics: dict[str, dict[str, float]]) -> Iterator[MadeBox]:
        """Yields the boxes of arrays that a slab makes, each valid until the next slab.

        Args:
            slab: what to make.
            statistics: takes the statistics of quantized parameters.

        Raises:
            SourceError: the source cannot be read, or holds values that are not finite.
        """
        bits = bits_of(slab.dtype)  # plain integers move faster than bfloat16 and keep every bit
        sources = [x.view(bits) for x in read_slab(self.reader, self.plan, slab, self._values, self._raw)]
        targets, changes = slab.binding.layout(sources, slab.sizes), slab.binding.arithmetic
        for stack, box, rearranged in zip(slab.binding.dst, slab.boxes(), targets, strict=True):
            name = stack.names[0]
            encoder = self.plan.encoders.get(name)
            target = self._calibrated(name, VALUES, box, slab.dtype, rearranged.view(slab.dtype))
            target = rearranged if target is None else target.view(bits)
            if (change := changes.get(name)) is not None:
                with np.errstate(all="ignore"):  # what is not finite is found below, and named
                    target = change.apply(rearranged.view(slab.dtype), slab.binding.sizes).view(bits)
                if self.plan.options.allow_nonfinite:
                    check_cast(name, rearranged.view(slab.dtype), target.view(slab.dtype))
            if encoder is None:
                yield self._checked(name, slab, sources, (self.plan.arrays[name], box, target))
                continue
            try:
                parts, found = encoder(target.view(slab.dtype), self._calibrated_parts(name, encoder, box))
            except FloatingPointError:
                raise self._not_finite(name, slab, sources) from None
            manifest.add_statistics(statistics.setdefault(name, {}), found)
            for part, values, full_name in zip(encoder.parts, parts, self.plan.stored_names(name), strict=True):
                part_box = tuple(slice(s.start // n, s.stop // n) for s, n in zip(box, part.blocks, strict=True))
                array = self.plan.arrays[full_name]
                array_box = tuple(box for axis, box in enumerate(part_box) if axis not in array.dropped)
                array_values = values.view(bits_of(part.dtype)).squeeze(array.dropped)
                yield self._checked(name, slab, sources, (array, array_box, array_values))

    def _calibrated_parts(self, name: str, encoder: Encoder, box: tuple[slice, ...]) -> list[np.ndarray]:
        """Returns the quantized values and the scales of a box of a parameter, as far as a calibration found them."""
        scales = encoder.parts[1]
        groups = tuple(slice(s.start // n, s.stop // n) for s, n in zip(box, scales.blocks, strict=True))
        found = [
            self._calibrated(name, QVALUES, box, np.dtype(np.uint8)),
            self._calibrated(name, SCALES, groups, scales.dtype, blocks=scales.blocks),
        ]
        return [part for part in found if part is not None]

    def _calibrated(
        self,
        name: str,
        kind: str,
        box: tuple[slice, ...],
        dtype: np.dtype[Any],
        others: np.ndarray | None = None,
        blocks: Sequence[int] | None = None,
    ) -> np.ndarray | None:
        """Returns the result of a calibration for a box of a parameter, if there was a calibration; see
        `CalibratedValues.read`."""
        if self.calibrated is None:
            return None
        shape = self.plan.arrays[self.plan.stored_names(name)[0]].shape
        shape = tuple(n // block for n, block in zip(shape, blocks or [1] * len(shape), strict=True))
        return self.calibrated.read(name, kind, shape, box, dtype, others)

    def _checked(self, name: str, slab: Slab, sources: Sequence[np.ndarray], made: MadeBox) -> MadeBox:
        """Returns a box of a parameter. Raises SourceError if a value is not finite."""
        array, _, values = made
        if not self.plan.options.allow_nonfinite and not all_finite(values, array.dtype):
            raise self._not_finite(name, slab, sources)
        return made

    def _not_finite(self, name: str, slab: Slab, sources: Sequence[np.ndarray]) -> SourceError:
        """Returns the error for values of a parameter that are not finite. It names the first one in the source."""
        values = np.concatenate([source.reshape(-1) for source in sources]).view(slab.dtype)
        found = np.flatnonzero(~np.isfinite(values.astype(np.float64)))
        details = []
        if found.size:
            number = int(found[0])
            for source, start, count in chain.from_iterable(slab.reads()):
                if number < count:
                    index = self.plan.tensors[source].place(start + number)
                    details.append(f"the first is {source}{index}, which is {values[found[0]]} in {slab.dtype.name}")
                    break
                number -= count
        return not_finite(self.plan, name, details)


def bits_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype of unsigned integers of the same size."""
    return np.dtype(f"u{dtype.itemsize}")
