"""Export."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuconv.memory import peak_memory
from tpuconv.progress import Listener, Progress, ignore


@dataclass(frozen=True)
class Export:
    """What `export` wrote.

    Attributes:
        out: the folder with the safetensors files.
        family: the family of the model.
        files: how many safetensors files there are.
        bytes: size of the tensors.
        already_there: whether OUT was complete before.
        seconds: wall-clock time.
        peak_memory_bytes: peak resident memory of this process.
    """

    out: Path
    family: str
    files: int
    bytes: int
    already_there: bool
    seconds: float
    peak_memory_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The keys that docs/json.md lists."""
        return {
            "out": str(self.out),
            "family": self.family,
            "files": self.files,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def export(
    ckpt: str | Path,
    out: str | Path,
    *,
    overwrite: bool = False,
    check: bool = False,
    progress: Listener = ignore,
) -> Export:
    """Writes a checkpoint as safetensors, under the names that its tensors had. What was neither cast nor dequantized
    comes back bit for bit.

    Args:
        ckpt: a checkpoint of ours.
        out: the folder to write; it appears complete or not at all.
        overwrite, check, progress: as of `convert`.

    Raises:
        TpuconvError: see `tpuconv.errors` for its children.
    """
    from tpuconv.api.evaluation import verify
    from tpuconv.checkpoint.manifest import read_manifest
    from tpuconv.convert import export as exporting
    from tpuconv.models.registry import get_family

    manifest, folder = read_manifest(Path(ckpt)), Path(out)
    family = get_family(manifest.family)
    config = family.read_config(exporting.released_config(manifest), manifest.allow_config, manifest.arrays)
    progress(Progress("exporting"))
    began, total, was_there = time.monotonic(), 0, False
    for step in exporting.export(manifest, family.table_of(manifest.variant), config, folder, overwrite=overwrite):
        progress(Progress("exporting", step.done, step.total))
        total, was_there = step.total, step.resumed == step.total
    if check and was_there:
        verify(folder, progress=progress).check()
    files = len(list(folder.glob("*.safetensors")))
    return Export(folder, family.name, files, total, was_there, time.monotonic() - began, peak_memory())
