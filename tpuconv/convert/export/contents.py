"""The contents of an export, before weights are read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tpuconv.convert.export.files import FileTensor
from tpuconv.convert.plan.types import Skip
from tpuconv.convert.run.engine import Work
from tpuconv.convert.run.sizing import Limits
from tpuconv.location import Location


@dataclass(frozen=True)
class ExportContents:
    """The contents of an export: what it writes, and the work that does.

    Attributes:
        checkpoint: the folder that is read.
        family: of the model.
        target: the program that the checkpoint is for.
        arrays: the folder of the Orbax checkpoint.
        skipped: the arrays or tensors that are not written.
        files: the tensors of each safetensors file.
        encoding: what config.json says of quantized tensors; None if there are none.
        work: the work that writes it, within limits.
    """

    checkpoint: Location
    family: str
    target: str
    arrays: Location
    skipped: tuple[Skip, ...]
    files: Sequence[Sequence[FileTensor]]
    encoding: dict[str, Any] | None
    work: Callable[[Limits], Work]
