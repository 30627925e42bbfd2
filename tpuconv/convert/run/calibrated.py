"""The results of a calibration for the run that writes the output: files in the work folder with the quantized values
of a parameter, or with other values of it. The run reads boxes of them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tpuconv.convert.plan.quantization import CalibrationPass
from tpuconv.errors import OutputError
from tpuconv.notation.layout import Shape
from tpuconv.sources.workspace import claim_for, release
from tpuconv.storage import disk
from tpuconv.storage.entries import RunJournal
from tpuconv.storage.journal import CALIBRATED, Journal

QVALUES, SCALES, ZERO_POINTS, VALUES = "qvalues", "scales", "zero_points", "values"
"""The kinds of files: quantized values and zero points, a byte each; scales in the dtype in which they are stored; and
values in the dtype of the parameter."""


@dataclass(frozen=True)
class CalibratedValues:
    """The files in a work folder. A parameter of stacked layers has one file for each layer."""

    work: Path

    @property
    def folder(self) -> Path:
        """The place of the files."""
        return self.work / CALIBRATED

    def write(self, parameter: str, layer: int | None, kind: str, values: np.ndarray) -> None:
        """Writes a parameter, or one layer of a stacked one, and flushes it."""
        disk.make_folder(self.folder)
        with disk.Writer(self._path(parameter, layer, kind), read_soon=True) as file:
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8))

    def read_layer(
        self, parameter: str, layer: int | None, kind: str, shape: Shape, dtype: np.dtype[Any]
    ) -> np.ndarray | None:
        """Returns a parameter, or one layer of a stacked one, of this shape; None if there is no file of this kind."""
        is_there = self._path(parameter, layer, kind).exists()
        return self._map(parameter, layer, kind, shape, dtype) if is_there else None

    def remove(self, parameter: str, layer: int | None, kind: str) -> None:
        """Removes the file of this kind, if it exists."""
        disk.remove(self._path(parameter, layer, kind))

    def read(
        self,
        parameter: str,
        kind: str,
        shape: Shape,
        box: Sequence[slice],
        dtype: np.dtype[Any],
        others: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Returns a box of a parameter of this shape; None if there is no file of this kind, as calibration left it
        alone. Of stacked layers it may have changed some: those without a file are as in `others`, of the shape of the
        box."""
        if self._path(parameter, None, kind).name in self._names:
            return self._map(parameter, None, kind, shape, dtype)[tuple(box)]
        layers = range(box[0].start, box[0].stop) if box else range(0)
        changed = [i for i in layers if self._path(parameter, i, kind).name in self._names]
        if not changed:
            return None
        return np.stack(
            [
                others[at] if others is not None and i not in changed
                else self._map(parameter, i, kind, shape[1:], dtype)[tuple(box[1:])]
                for at, i in enumerate(layers)
            ]
        )  # fmt: skip

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(disk.entries(self.folder) if self.folder.exists() else ())

    def _path(self, parameter: str, layer: int | None, kind: str) -> Path:
        return self.folder / (f"{parameter}.{kind}" if layer is None else f"{parameter}.{layer}.{kind}")

    def _map(self, parameter: str, layer: int | None, kind: str, shape: Shape, dtype: np.dtype[Any]) -> np.ndarray:
        path = self._path(parameter, layer, kind)
        try:
            mapped: np.ndarray = np.memmap(path, np.uint8, "r")
            return mapped.view(dtype).reshape(shape)
        except (OSError, ValueError) as e:
            raise OutputError(
                f"{path} cannot be read: {e}", hint=f"move {self.work} away, and run again to begin anew"
            ) from None


@dataclass(frozen=True)
class CalibrationRun:
    """A calibration, and the journal in whose work folder it leaves what it finds; see `CalibrationPass`."""

    calibration: CalibrationPass
    journal: Journal

    @property
    def values(self) -> CalibratedValues:
        """The files of the calibration."""
        return CalibratedValues(self.journal.folder)

    def layers(self) -> Iterator[str]:
        """Does what is left to do. Yields the name of each layer before."""
        return self.calibration.run(self.journal)

    def found(self) -> Mapping[str, np.ndarray]:
        """Returns the arrays that it found."""
        return self.calibration.found(self.journal)

    def results(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the manifest's facts of each parameter."""
        return self.calibration.results(self.journal)


@contextmanager
def calibration_run(
    calibration: CalibrationPass, journal: RunJournal, fingerprint: str, workspace: Path | None
) -> Iterator[CalibrationRun]:
    """Yields a calibration with the journal of the output. An output in a bucket has no work folder on a disk: for one
    there is another journal on the local disk, which is removed when the body ends. After an error or a kill, a run on
    the same machine goes on with it, and one on another machine begins anew, to the same bits.

    Args:
        calibration: what runs.
        journal: of the output.
        fingerprint: of the plan and the files of its source.
        workspace: the folder for the other journal; that for temporary files if it is None.
    """
    if isinstance(journal, Journal):
        yield CalibrationRun(calibration, journal)
        return
    root, lock = claim_for(journal.work, workspace)
    try:
        with Journal(root / CALIBRATED, fingerprint, overwrite=True) as own:
            own.begin()
            yield CalibrationRun(calibration, own)
            own.discard()
    finally:
        release(root, lock)
