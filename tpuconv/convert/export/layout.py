"""How an export lays tensors out: which are made together, and which file each goes to."""

from dataclasses import dataclass
from typing import Any

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
    """

    pieces: list[ExportPiece]
    files: list[list[ExportTensor]]
    scheme: str | None
    encoding: dict[str, Any] | None

    @property
    def slabs(self) -> dict[str, int]:
        """By name in how many slabs a tensor is made, if there are several."""
        return {tensor.of: len(piece.slabs) for piece in self.pieces if piece.letter for tensor in piece.tensors}


def lay_out(arrays: ArraySource, what: Exporting) -> FileLayout:
    """Lays out what is exported of arrays. Raises as `export_pieces` does."""
    beside = what.beside
    scheme = what.scheme or (IN_COMPRESSED if arrays.manifest.is_rounded else None)
    pieces, encoding = export_pieces(arrays, what.table, what.config, beside.modules if beside else (), scheme)
    files = divide_tensors([*(t for piece in pieces for t in piece.tensors), *(beside.tensors if beside else ())])
    return FileLayout(pieces, files, scheme, encoding)
