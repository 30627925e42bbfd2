"""The layout of an export: the tensors that are made together, and the file of each tensor."""

from dataclasses import dataclass
from math import prod
from typing import Any

from tpuconv.checkpoint.manifest import Manifest, element_bytes
from tpuconv.convert.export.array_source import ArraySource
from tpuconv.convert.export.exporting import Exporting
from tpuconv.convert.export.files import divide_tensors
from tpuconv.convert.export.rows import ExportPiece, export_pieces
from tpuconv.convert.export.serving.formats import IN_COMPRESSED
from tpuconv.convert.export.tensor import ExportTensor


@dataclass(frozen=True)
class FileLayout:
    """The files of an export, before a value is read.

    Attributes:
        pieces: the tensors that are made together, in the order in which they are written.
        files: the tensors of each file.
        scheme: in which quantized parameters are written; None if there are none, or they stay as they were released.
        encoding: what config.json says about it.
        job_bytes: the most memory that making a piece, or a slab of one, takes.
    """

    pieces: list[ExportPiece]
    files: list[list[ExportTensor]]
    scheme: str | None
    encoding: dict[str, Any] | None
    job_bytes: int

    @property
    def nbytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.nbytes for file in self.files for tensor in file)


def lay_out(arrays: ArraySource, what: Exporting) -> FileLayout:
    """Lays out what is exported of arrays. Raises as `export_pieces` does."""
    beside = what.beside
    scheme = what.scheme or (IN_COMPRESSED if arrays.manifest.is_rounded else None)
    pieces, encoding = export_pieces(arrays, what.table, what.config, beside.modules if beside else (), scheme)
    files = divide_tensors([*(t for piece in pieces for t in piece.tensors), *(beside.tensors if beside else ())])
    carried = max((tensor.nbytes for tensor in beside.tensors), default=0) if beside else 0
    job_bytes = max((_job_bytes(piece, arrays.manifest) for piece in pieces), default=0)
    return FileLayout(pieces, files, scheme, encoding, max(job_bytes, carried) + arrays.manifest.chunk_memory)


def _job_bytes(piece: ExportPiece, manifest: Manifest) -> int:
    """Returns the memory that a slab of a piece takes: values as they are stored, as they are wanted, rearranged,
    encoded."""
    total = 0
    for row in piece.rows:
        arrays = sum(map(prod, row.inverse.layout.src_shapes(row.inverse.sizes)))
        tensors = sum(prod(tensor.shape) for tensor in row.tensors)
        size = max(element_bytes(manifest.arrays[stack.names[0]].dtype) for stack in row.inverse.src)
        total += 4 * max(2, size) * max(arrays, tensors)
    return -(-total // len(piece.slabs))
