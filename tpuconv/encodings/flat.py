"""Reading values in blocks that know no rows: what bitsandbytes stores (`tpuconv.encodings.scheme.Flat`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from tpuconv.encodings.scales import check_scales
from tpuconv.encodings.scheme import FLAT_BLOCKS, NESTED_BLOCK, NESTED_SCALES, NESTED_VALUES, Scheme
from tpuconv.errors import SourceError
from tpuconv.jsonfile import Exactly, OneOf, Range, check, parse
from tpuconv.notation.layout import Shape
from tpuconv.sources.headers import DTYPES, TensorInfo
from tpuconv.sources.reader import Reader

FLAT_STATE = {"quant_type": str, "blocksize": OneOf(*FLAT_BLOCKS), "dtype": str, "shape": [Range(1)]}
NESTED_STATE = {
    **FLAT_STATE,
    "nested_blocksize": OneOf(NESTED_BLOCK),
    "nested_dtype": OneOf("float32"),
    "nested_offset": float,
}
"""The schemas of the text beside a matrix: bitsandbytes' `QuantState.as_dict`."""
OTHER_WRITER = (
    "the tensor was written by another version of its library, or is damaged: download it again, or convert an "
    "unquantized release"
)
MAX_STATE_BYTES = 4096
BLOCKS_AT_ONCE = 1 << 12
"""Blocks whose tables are made together: they stay in the second-level cache until they are used."""


@dataclass(frozen=True)
class FlatParts:
    """The stored tensors of a matrix.

    Attributes:
        scheme: how they are encoded.
        shape: of the matrix.
        values, scales: the stored tensors.
        extra: the others, by suffix.
        any_scales: whether scales that are not finite are decoded without an error.
    """

    scheme: Scheme
    shape: Shape
    values: TensorInfo
    scales: TensorInfo
    extra: Mapping[str, TensorInfo]
    any_scales: bool

    def text(self, reader: Reader) -> Mapping[str, Any]:
        """Returns the parsed text, as `FLAT_STATE` or `NESTED_STATE` describes it.

        Raises:
            SourceError: it does not have this schema.
        """
        assert self.scheme.flat is not None
        info = self.extra[self.scheme.flat.state]
        data = np.empty(info.nbytes, np.uint8)
        reader.read(info, 0, data.data)
        kind = {"quant_type": OneOf(self.scheme.flat.state.rpartition("__")[2])}
        schema = Exactly((NESTED_STATE if self.scales.dtype == NESTED_SCALES else FLAT_STATE) | kind)
        try:
            text: Mapping[str, Any] = check(
                parse(data.tobytes(), info.name, SourceError), schema, info.name, SourceError
            )
        except SourceError as e:
            raise SourceError(e.message, hint=OTHER_WRITER) from None
        return text

    def state(self, reader: Reader) -> Mapping[str, Any]:
        """Returns the text, which must fit.

        Raises:
            SourceError: it does not have its schema, or contradicts the shape or the number of scales.
        """
        assert self.scheme.flat is not None
        name, state = self.extra[self.scheme.flat.state].name, self.text(reader)
        size = prod(self.shape)
        if tuple(state["shape"]) != self.shape:
            raise SourceError(
                f"{name} says the shape {state['shape']}, but config.json wants {list(self.shape)}",
                hint="the weights do not belong to this config.json: download both again",
            )
        if (count := -(-size // state["blocksize"])) != self.scales.size:
            raise SourceError(
                f"{name} says blocks of {state['blocksize']}, which are {count}, but {self.scales.name} holds "
                f"{self.scales.size} scales",
                hint=OTHER_WRITER,
            )
        return state

    def block_scales(self, reader: Reader, first: int, last: int, state: Mapping[str, Any]) -> np.ndarray:
        """Returns the scales of some blocks, in float32; of nested ones (number * scale) + offset, each rounded to
        float32.

        Raises:
            SourceError: one is not finite, unless `any_scales`.
        """
        stored = self._part(reader, self.scales, first, last)
        if self.scales.dtype != NESTED_SCALES:
            return stored
        assert self.scheme.flat is not None
        table = self._part(reader, self.extra[self.scheme.flat.nested_table], 0, NESTED_VALUES)
        begin = first // NESTED_BLOCK
        outer = self._part(reader, self.extra[self.scheme.flat.nested_scales], begin, -(-last // NESTED_BLOCK))
        scales: np.ndarray = table[stored] * outer[np.arange(first, last) // NESTED_BLOCK - begin]
        with np.errstate(over="ignore"):  # what overflows is named
            scales += np.float32(state["nested_offset"])
        if not self.any_scales:
            check_scales(self.scales.name, scales, self.scales.shape, first, any_sign=True)
        return scales

    def _part(self, reader: Reader, info: TensorInfo, first: int, last: int) -> np.ndarray:
        stored = np.empty(last - first, DTYPES[info.dtype])
        reader.read(info, first * stored.itemsize, stored.view(np.uint8).data)
        if stored.dtype.kind == "f" and not self.any_scales:
            check_scales(info.name, stored, info.shape, first, any_sign=True)
        return stored

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Fills `out`, flat and of any float dtype, with values from number `start` on: number * scale in float32,
        rounded once. Complete blocks are read; `raw` [bytes] is memory for them, if it is large enough.

        Raises:
            SourceError: the text or a scale is invalid, or the source cannot be read.
        """
        from tpuconv.encodings.kernels import look_up

        state = self.state(reader)
        block, stop, bits = state["blocksize"], start + out.size, np.dtype(f"u{out.itemsize}")
        first, last = start // block, -(-stop // block)
        scales = self.block_scales(reader, first, last, state)
        begin, end = first * block // 2, min(last * block // 2, self.values.nbytes)
        raw = raw[: end - begin] if raw.size >= end - begin else np.empty(end - begin, np.uint8)
        reader.read(self.values, begin, raw.data)
        for done in range(0, len(scales), BLOCKS_AT_ONCE):
            tables = scales[done : done + BLOCKS_AT_ONCE, None] * self.scheme.table
            packed = raw[done * block // 2 :][: len(tables) * block // 2]
            values = np.empty(2 * packed.size, out.dtype)
            # The first of two values is in the high half.
            swapped = packed >> np.uint8(4) | packed << np.uint8(4)
            look_up(swapped, tables.astype(out.dtype).view(bits)[None], 0, values.size, block, values.view(bits))
            at = (first + done) * block
            inside = slice(max(start - at, 0), min(stop - at, values.size))
            out[max(at - start, 0) :][: inside.stop - inside.start] = values[inside]
