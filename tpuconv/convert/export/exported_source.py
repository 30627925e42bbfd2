"""A checkpoint for another program, or of a trainer, as a source: its tensors are those that an export would write.
They are made when they are read."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tpuconv.convert.export.array_source import ArraySource, exported_config
from tpuconv.convert.export.exporting import Exporting
from tpuconv.convert.export.layout import lay_out
from tpuconv.convert.export.making import make_piece
from tpuconv.convert.export.rows import ExportPiece
from tpuconv.convert.plan import sizes
from tpuconv.sources.headers import TensorInfo
from tpuconv.sources.reader import Reader
from tpuconv.sources.shard import SourceShard
from tpuconv.sources.source import Source

KEPT_BYTES = 8 * sizes.SLAB_BYTES
"""The bytes of pieces that are kept after they were made. A piece is read slab by slab, by several threads."""


@dataclass(frozen=True)
class ExportedSource(Source):
    """The tensors of a checkpoint under the names of its release. A piece, which is made at once, is one
    shard. `pieces` has the piece of each tensor, and its number in it."""

    arrays: ArraySource = field(kw_only=True)
    pieces: Mapping[str, tuple[ExportPiece, int]] = field(kw_only=True)

    hashed = False

    @property
    def skipped_before(self) -> Sequence[Mapping[str, Any]]:
        """The tensors that the conversion of the original source skipped."""
        skipped: Sequence[Mapping[str, Any]] = self.arrays.manifest.raw.get("skipped", ())
        return skipped

    def origin(self, hashes: Mapping[str, str | None]) -> dict[str, Any]:
        """Returns the manifest's description of the original source."""
        return self.arrays.manifest.origin

    def open(
        self, check_cancelled: Callable[[], None] = lambda: None, *, hashes: Collection[str] | None = None
    ) -> "ExportedReader":
        """Returns a reader of the tensors."""
        return ExportedReader(self.arrays, self.pieces)


def exported_source(arrays: ArraySource, what: Exporting) -> ExportedSource:
    """Returns a checkpoint as a source. Parameters that rules quantized are decoded when they are read.

    Args:
        arrays: of the checkpoint.
        what: would be exported of them.

    Raises:
        TpuconvError: as `tpuconv.api.plan_export` does.
    """
    layout = lay_out(arrays, what)
    config = exported_config(arrays) | ({"quantization_config": layout.encoding} if layout.encoding else {})
    tensors, pieces, shards = {}, {}, []
    for piece in layout.pieces:
        first = piece.tensors[0].name
        nbytes = sum(tensor.nbytes for tensor in piece.tensors)
        shards.append(SourceShard(first, nbytes, digest=arrays.manifest.sealed.identity))
        for number, tensor in enumerate(piece.tensors):
            tensors[tensor.name] = TensorInfo(tensor.name, tensor.dtype, tensor.shape, first, 0, tensor.nbytes)
            pieces[tensor.name] = piece, number
    origin = arrays.manifest.raw["source"]
    return ExportedSource(
        arrays.companions_folder,
        config,
        tensors,
        tuple(shards),
        origin["repo"],
        origin["commit"],
        companions=arrays.companions,
        arrays=arrays,
        pieces=pieces,
    )


class ExportedReader(Reader):
    """Reads the tensors of an `ExportedSource`; see `tpuconv.sources.reader.Reader`."""

    def __init__(self, arrays: ArraySource, pieces: Mapping[str, tuple[ExportPiece, int]]):
        self._arrays, self._pieces = arrays, pieces
        self._made: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        self._locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()
        arrays.check()

    def read(self, info: TensorInfo, start: int, out: memoryview) -> None:
        """Fills `out` with the bytes of a tensor from byte `start` on."""
        out[:] = self._tensor(info.name).reshape(-1).view(np.uint8)[start : start + len(out)].data

    def read_box(self, info: TensorInfo, box: Sequence[slice], out: np.ndarray) -> None:
        """Fills `out` with a box of a tensor."""
        out[...] = self._tensor(info.name).view(out.dtype)[tuple(box)]

    def _tensor(self, name: str) -> np.ndarray:
        """Returns a tensor. The pieces that were read last are kept."""
        piece, number = self._pieces[name]
        with self._lock:
            lock = self._locks.setdefault(id(piece), threading.Lock())
        with lock:
            with self._lock:
                made = self._made.pop(id(piece), None)
            if made is None:
                slabs = [make_piece(self._arrays, piece, ranges)[0] for ranges in piece.slabs]
                made = [
                    parts[0] if tensor.fixed or len(parts) == 1 else np.concatenate(parts)
                    for tensor, parts in zip(piece.tensors, zip(*slabs, strict=True), strict=True)
                ]
            with self._lock:
                self._made[id(piece)] = made
                while len(self._made) > 1 and self._kept_bytes() > KEPT_BYTES:
                    self._made.popitem(last=False)
        return np.ascontiguousarray(made[number])

    def _kept_bytes(self) -> int:
        return sum(values.nbytes for tensors in self._made.values() for values in tensors)

    def hash_of(self, shard: str) -> None:
        """None: the chunks of arrays have checksums, which are checked when they are read."""

    def check_unchanged(self, shards: Collection[str] | None = None) -> None:
        """Raises SourceError if the checkpoint was replaced."""
        self._arrays.finish({})

    def close(self) -> None:
        """Forgets what was made."""
        self._made.clear()
