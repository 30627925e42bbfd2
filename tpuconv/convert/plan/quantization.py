"""The quantization of a plan: the encoder of each parameter, and its calibration before."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from tpuconv.errors import UnsupportedConfig
from tpuconv.names import collapse
from tpuconv.notation.layout import Shape
from tpuconv.storage.journal import Journal

REPORT = "quantization.html"


@dataclass(frozen=True)
class EncodedComponent:
    """One of the arrays that hold an encoded parameter.

    Attributes:
        suffix: of its name, after the parameter's.
        blocks: for each axis, how many elements of the parameter one element stands for.
        own: whether it holds the parameter's values. Others, such as scales, do not count as parameters.
        bits: how many bits of an element are used, if not all.
    """

    suffix: str
    dtype: np.dtype[Any]
    blocks: Shape
    own: bool = False
    bits: float | None = None


@dataclass(frozen=True)
class FoundArray:
    """A small float32 array that a calibration finds, and that no tensor of the source makes."""

    shape: Shape
    axes: str


class Encoder(Protocol):
    """Makes, from the values of a parameter, the arrays that hold it, such as quantized values and their scales."""

    @property
    def blocks(self) -> Shape:
        """For each axis, how many elements must be encoded together; 1 if it does not matter."""

    @property
    def parts(self) -> tuple[EncodedComponent, ...]:
        """The arrays that it makes."""

    def __call__(
        self, values: np.ndarray, calibrated: Sequence[np.ndarray] = ()
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Encodes a box of complete blocks, which need not be contiguous. `calibrated` are the bytes of its quantized
        values, and their scales, where a calibration found them.

        Returns:
            The values of each part, and statistics that can be added up.

        Raises:
            FloatingPointError: a value is infinite or NaN.
        """

    def check(self) -> None:
        """Raises GateError if the result is wrong. Called before it counts as done."""

    def to_json(self) -> dict[str, Any]:
        """Everything that determines the result."""


class CalibrationPass(Protocol):
    """Runs the model layer by layer before the output is written; see `tpuconv.quantize.calibrate`."""

    @property
    def memory(self) -> int:
        """The private memory in bytes that it needs at most."""

    @property
    def entries(self) -> list[str]:
        """The entries of its journal."""

    def run(self, journal: Journal) -> Iterator[str]:
        """Does what is left to do, and leaves `CalibratedValues` in the work folder. Yields the name of each layer
        before it is calibrated."""

    def results(self, journal: Journal) -> dict[str, dict[str, Any]]:
        """Returns further facts for the manifest of each calibrated parameter, after the run."""

    def found(self, journal: Journal) -> dict[str, np.ndarray]:
        """The arrays that `Quantization.found` describes, after the run."""


@dataclass(frozen=True)
class Quantization:
    """Which parameters are encoded, and by which rules.

    Attributes:
        encoders: of each parameter that is quantized.
        config: what the manifest says of the rules.
        report: makes the text of the file `REPORT` from the whole manifest.
        passthrough: the parameters that the source has in exactly the type that is asked for, with the number of the
            rule that asks. Their quantized values and scales are copied.
        calibration: runs before the output is written; None to round each weight to the nearest value.
        found: the arrays that it finds.
    """

    encoders: Mapping[str, Encoder]
    config: Mapping[str, Any]
    report: Callable[[Mapping[str, Any]], str]
    passthrough: Mapping[str, int] = field(default_factory=dict)
    calibration: CalibrationPass | None = None
    found: Mapping[str, FoundArray] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str], target: str) -> "Quantization":
        """Returns the same with other names of the parameters.

        Raises:
            UnsupportedConfig: a parameter that is quantized has none, since the target joins or changes it.
        """
        if missing := [name for name in (*self.encoders, *self.passthrough) if name not in names]:
            raise UnsupportedConfig(
                f"{target} has no quantized {', '.join(collapse(missing))}: it joins or changes the parameter",
                hint="leave them out of the rules, or convert without `quantize=`",
            )
        encoders = {names[name]: encoder for name, encoder in self.encoders.items()}
        passthrough = {names[name]: rule for name, rule in self.passthrough.items()}
        return replace(self, encoders=encoders, passthrough=passthrough)
