"""Reading the source of slabs, and what is checked of it while a plan runs."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isfinite

import numpy as np

from tpuconv.buckets import for_each
from tpuconv.convert.plan.types import ZEROS, Plan
from tpuconv.convert.plan.units import Slab
from tpuconv.encodings.casts import values_not_finite
from tpuconv.errors import SourceError
from tpuconv.jsonfile import MIB
from tpuconv.sources.damaged import wrong_hash
from tpuconv.sources.headers import DTYPES
from tpuconv.sources.reader import Reader
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import Source

ALIGNED_TO = 8
"""The bytes that the memory of a tensor begins at a multiple of, as values of any dtype need it."""


def read_slab(reader: Reader, plan: Plan, slab: Slab, values: np.ndarray, raw: np.ndarray) -> list[np.ndarray]:
    """Returns the source tensors of a slab, in the dtype of its values.

    Args:
        reader: of the source.
        plan: the slab's.
        slab: what to read.
        values: bytes for all values of the slab, with `room_for` them, from the beginning of a page on.
        raw: bytes for the values as they are stored, if that is another dtype.
    """
    if plan.is_box(slab):
        (box,) = slab.boxes()
        out = values[: slab.nbytes].view(slab.dtype).reshape([s.stop - s.start for s in box])
        reader.read_box(plan.tensors[slab.binding.src[0].names[0]].values, box, out)
        return [out]
    all_parts, shapes = list(slab.reads()), slab.binding.layout.src_shapes(slab.sizes)
    if len(all_parts) == len(all_parts[0]) == 1 and plan.is_plain(slab):
        ((name, start, _),) = all_parts[0]
        found = reader.view(plan.tensors[name].values, start * slab.dtype.itemsize, slab.nbytes, values)
        if found.ctypes.data % slab.dtype.itemsize:  # an odd place in the file, which compiled loops do not take
            values.data[: found.size] = found.data  # one over the other
            found = values[: found.size]
        return [found.view(slab.dtype).reshape(shapes[0])]
    reads: list[tuple[str, int, np.ndarray]] = []
    sources, used = [], 0
    for parts, shape in zip(all_parts, shapes, strict=True):
        first = used
        for name, start, count in parts:
            reads.append((name, start, values[used : used + count * slab.dtype.itemsize].view(slab.dtype)))
            used += reads[-1][2].nbytes
        sources.append(values[first:used].view(slab.dtype).reshape(shape))

    def read(each: tuple[tuple[str, int, np.ndarray], np.ndarray]) -> None:
        (name, start, out), own_raw = each
        with np.errstate(all="ignore"):  # what is not finite is found in the chunks, and named
            plan.tensors[name].read(reader, start, own_raw, out)

    each_raw, at_a_time = [raw] * len(reads), reader.reads_at_a_time
    if at_a_time > 1 and not all(plan.tensors[name].is_stored_as(slab.dtype) for name in slab.names):
        divided = _divided(raw, [plan.tensors[name].stored_bytes(out.size) for name, _, out in reads])
        each_raw, at_a_time = (divided, at_a_time) if divided else (each_raw, 1)
    for_each(read, list(zip(reads, each_raw, strict=True)), at_a_time)
    return sources


def _divided(raw: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Returns the memory for the stored bytes of tensors that are read side by side, from their sizes; empty if there
    is not enough for all."""
    starts = list(accumulate((-(-size // ALIGNED_TO) * ALIGNED_TO for size in sizes), initial=0))
    if starts[-1] > raw.size:
        return []
    return [raw[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def tensor_scales(reader: Reader, plan: Plan, slab: Slab) -> dict[str, float]:
    """Returns the scales of tensors that the kept scales of a slab were multiplied with, by the names of the source.
    Those that are not finite, which JSON does not hold, are left out."""
    kept = (plan.tensors[name] for name in slab.names if plan.tensors[name].passthrough)
    found = {each.tensor_scale.name: float(each.read_tensor_scale(reader)[0]) for each in kept if each.tensor_scale}
    return {name: scale for name, scale in found.items() if isfinite(scale)}


def check_copy(
    plan: Plan, reader: Reader, copy: str, original: str, check_cancelled: Callable[[], None] = lambda: None
) -> None:
    """Raises SourceError if a tensor that is taken for a copy of another one, or for zeros, holds other values."""
    if original == ZEROS:
        info = plan.tensors[copy].values
        stored = np.empty(info.nbytes, np.uint8)
        reader.read(info, 0, stored.data)
        if stored.view(DTYPES[info.dtype]).any():
            raise SourceError(
                f"{copy} has values other than 0, and the model that config.json describes has no such bias",
                hint="check that config.json belongs to these files, and its attention_bias and mlp_bias",
            )
        return
    a, b = (plan.tensors[name].values for name in (copy, original))
    buffers = [memoryview(bytearray(min(4 * MIB, a.nbytes))) for _ in range(2)]
    for start in range(0, a.nbytes, 4 * MIB):
        check_cancelled()
        views = [buffer[: a.nbytes - start] for buffer in buffers]
        for info, view in zip((a, b), views, strict=True):
            reader.read(info, start, view)
        if views[0] != views[1]:
            raise SourceError(
                f"{copy} should be a copy of {original}, but holds other values",
                hint="set tie_word_embeddings in config.json to what the model was trained with"
                + (", or leave out `include_mtp=`" if plan.options.include_mtp else ""),
            )


def check_promise(source: Source, reader: Reader, shard: SourceShard) -> str | None:
    """Returns the hash of a shard; None if the source has checksums of its own. Raises DamagedDownload if it is not
    that which the Hub promises."""
    digest = reader.hash_of(shard.name)
    if digest is not None and shard.sha256 is not None and digest != shard.sha256:
        raise wrong_hash(source.folder / shard.name, shard.sha256, digest)
    return digest


def check_as_promised(source: Source, reader: Reader) -> None:
    """Checks that a source is still what it was when it was opened, and that its files have the hashes that the Hub
    promises. Reads what the reader has not hashed yet.

    Raises:
        SourceError: a file is missing or changed.
        DamagedDownload: a file has another hash.
    """
    reader.check_unchanged()
    for shard in source.promised:
        check_promise(source, reader, shard)


def not_finite(plan: Plan, name: str, details: Sequence[str] = ()) -> SourceError:
    """Returns the error for values of a parameter that are not finite."""
    return values_not_finite(name, details, plan.source.not_finite_hint)
