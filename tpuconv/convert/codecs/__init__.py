"""Encodings: how a checkpoint stores a tensor in several, and the values that they stand for.

An encoding is a property of the checkpoint, found from config.json's `quantization_config`, and knows no family. All of
them are one scheme: a byte stands for one value or two (a table of 256 entries), and a block of values shares a scale.
What differs is the table, the block, the names and the dtype of the scales.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from tpuconv.convert.codecs.schemes import Scheme, schemes
from tpuconv.convert.names import collapse
from tpuconv.convert.source import DTYPES, Reader, TensorInfo
from tpuconv.layout import Shape

STRIP_BYTES = 1 << 20
"""Decoded float32 values at a time: they stay in the second-level cache until they are rounded."""
LARGE_BLOCK = 1 << 12
"""Values that share a scale, from which on a table of their own pays."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as a family's table sees it: plain, or decoded from `values` and `scales` by `scheme`."""

    name: str
    shape: Shape
    values: TensorInfo
    scales: TensorInfo | None = None
    extra: tuple[TensorInfo, ...] = ()
    scheme: Scheme | None = None

    kept = False
    """Whether it stays encoded, so that it is never cast."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values: the stored one, or bfloat16 where they are decoded."""
        return DTYPES[self.values.dtype] if self.scheme is None else np.dtype(ml_dtypes.bfloat16)

    @property
    def stored(self) -> tuple[TensorInfo, ...]:
        """The tensors of the source that it is made of."""
        return (self.values, *((self.scales,) if self.scales else ()), *self.extra)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def stored_bytes(self, count: int) -> int:
        """Bytes in which `count` values are stored, scales aside."""
        return count * self.values.nbytes // max(1, self.size)

    def is_stored_as(self, dtype: np.dtype[Any]) -> bool:
        """Whether its bytes are values of that dtype."""
        return self.scheme is None and self.dtype == dtype

    def read(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """Fills `out`, flat and of any float dtype, with the values from number `start` on. `raw` is room for their
        bytes, unless they are stored as they are wanted."""
        if self.scheme is not None:
            self._decode(reader, start, raw, out)
        elif out.dtype == self.dtype:
            reader.read(self.values, start * out.itemsize, out.view(np.uint8).data)
        else:
            raw = raw[: out.size * self.dtype.itemsize]
            reader.read(self.values, start * self.dtype.itemsize, raw.data)
            np.copyto(out, raw.view(self.dtype), casting="unsafe")

    def _decode(self, reader: Reader, start: int, raw: np.ndarray, out: np.ndarray) -> None:
        """The product of table entry and scale in float32, rounded once to the dtype of `out`."""
        assert self.scheme is not None
        assert self.scales is not None
        raw = raw[: self.stored_bytes(out.size)]
        reader.read(self.values, self.stored_bytes(start), raw.data)
        scales = np.empty(self.scales.nbytes, np.uint8)
        reader.read(self.scales, 0, scales.data)
        columns = self.shape[-1] if self.shape else 1
        block_rows, block_columns = self.scheme.block(self.shape, self.scales.shape)
        scales_RC = self.scheme.decode_scales(scales.view(DTYPES[self.scales.dtype]))
        scales_RC = scales_RC.reshape(-1, -(-columns // block_columns))
        whole = start % columns == out.size % columns == columns % block_columns == 0
        large = block_rows * block_columns >= LARGE_BLOCK and scales_RC.shape[1] <= 256
        if whole and large and self.scheme.per_element == 1:
            codes, values = raw.reshape(-1, columns), out.reshape(-1, columns)
            self._decode_by_tables(codes, start // columns, scales_RC, block_rows, values)
            return
        strip = max(1, STRIP_BYTES // (4 * columns))
        buffer = np.empty(min(out.size, strip * columns), np.float32)
        done = 0
        while done < out.size:
            row, first = divmod(start + done, columns)
            # Whole rows, as many as stay in the cache and have their scales in step; or what is asked of one row.
            rows = min((out.size - done) // columns, strip, strip if block_rows == 1 else block_rows - row % block_rows)
            rows = max(1, rows) if first == 0 else 1
            count = min(rows * columns, columns - first if rows == 1 else out.size, out.size - done)
            part = buffer[:count].reshape(rows, -1)
            self.scheme.look_up(raw[self.stored_bytes(done) : self.stored_bytes(done + count)], buffer[:count])
            own = scales_RC[row : row + rows] if block_rows == 1 else scales_RC[row // block_rows][None]
            if part.shape[1] == own.shape[1] * block_columns:
                blocks = part.reshape(rows, -1, block_columns)
                np.multiply(blocks, own[:, :, None], out=blocks)
            else:  # a part of a row, or a short last block
                part *= np.repeat(own, block_columns, axis=1)[:, first : first + part.shape[1]]
            np.copyto(out[done : done + count].reshape(part.shape), part, casting="unsafe")
            done += count

    def _decode_by_tables(
        self, codes: np.ndarray, first_row: int, scales_RC: np.ndarray, block_rows: int, out: np.ndarray
    ) -> None:
        """The same for whole rows of large blocks of bytes: one look-up among the 256 products of each block, rounded
        beforehand. At most 256 blocks stand side by side: that many tables have indices of 16 bits."""
        assert self.scheme is not None
        blocks = scales_RC.shape[1]
        first_codes = (256 * np.arange(blocks, dtype=np.uint16))[:, None]
        strip = max(1, STRIP_BYTES // (4 * out.shape[1]))
        indices = np.empty((strip, *out.shape[1:]), np.uint16)
        bits = np.dtype(f"u{out.itemsize}")
        at, stop = first_row, first_row + len(out)
        while at < stop:
            end = min(stop, at - at % block_rows + block_rows)
            products = scales_RC[at // block_rows, :, None] * self.scheme.table.reshape(-1)
            table = products.astype(out.dtype).reshape(-1).view(bits)
            for i in range(at - first_row, end - first_row, strip):
                n = min(strip, end - first_row - i)
                by_block = indices[:n].reshape(n, blocks, -1)
                np.add(codes[i : i + n].reshape(by_block.shape), first_codes, out=by_block)
                np.take(table, indices[:n], out=out[i : i + n].view(bits), mode="clip")
            at = end


def decode_names(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None
) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors of a source as tables see them, and the faults: values without scales, scales without values, scales
    of another shape than the blocks have.

    Raises:
        UnsupportedConfig: an encoding that is not implemented.
    """
    known = schemes(quantization)
    suffixes = [suffix for scheme in known for suffix in (scheme.values, scheme.scales, *scheme.extra)]
    out: dict[str, Tensor] = {}
    taken: set[str] = set()
    faults: dict[str, list[str]] = {}
    for name, info in tensors.items():
        scheme = next((s for s in known if name.endswith(s.values) and s.encodes(info)), None)
        if scheme is None:
            continue
        base = name.removesuffix(scheme.values)
        scales = tensors.get(base + scheme.scales)
        extra = tuple(tensors[base + suffix] for suffix in scheme.extra if base + suffix in tensors)
        taken |= {name, base + scheme.scales, *(part.name for part in extra)}
        shape = scheme.shape(info.shape)
        if scales is None:
            faults.setdefault(f"has no {scheme.scales.removeprefix('.')}", []).append(name)
        elif scales.shape != (want := scheme.scale_shape(shape, scales.shape)):
            faults.setdefault(f"should be {list(want)} by the block size", []).append(scales.name)
        else:
            out[base + scheme.name] = Tensor(base + scheme.name, shape, info, scales, extra, scheme)
    for name, info in tensors.items():
        if name in taken:
            continue
        if any(name.endswith(suffix) for suffix in suffixes if suffix != ".weight"):
            faults.setdefault("has no values that it belongs to", []).append(name)
        else:
            out[name] = Tensor(name, info.shape, info)
    words = [
        f"{pattern}  {tensors[names[0]].dtype} {list(tensors[names[0]].shape)} ({len(names)} tensors) {fault}"
        for fault, all_names in faults.items()
        for pattern, names in collapse(all_names).items()
    ]
    return out, words
