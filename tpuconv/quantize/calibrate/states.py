"""The hidden states between two layers, in files."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpuconv.errors import GateError
from tpuconv.storage import disk


@dataclass(frozen=True)
class HiddenStates:
    """The hidden states of all samples before a layer: a file of float32 [samples, length, W]."""

    path: Path
    length: int

    def write(self, states: Iterator[np.ndarray], of_what: str) -> None:
        """Writes and flushes the states [T, D] of each sample.

        Raises:
            GateError: one is not finite.
        """
        disk.make_folder(self.path.parent)
        with disk.Writer(self.path, read_soon=True) as file:
            for number, x_TD in enumerate(states):
                if not np.isfinite(x_TD).all():
                    raise GateError(
                        f"the output of {of_what} is not finite on sample {number} of the text",
                        hint="`tpuconv verify --compare-hf` says whether the checkpoint is right; an id outside of the "
                        "vocabulary gives NaN too",
                    )
                file.write(np.ascontiguousarray(x_TD, np.float32))

    def read(self, sample: int, width: int) -> np.ndarray:
        """Returns the states [T, W] of a sample."""
        count = self.length * width
        values = np.fromfile(self.path, np.float32, count, offset=4 * sample * count)
        return values.reshape(self.length, width)
