"""Verify: every array and file of an output against its manifest."""

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuconv.errors import CorruptOutput, UsageError, shorten
from tpuconv.location import Location, local_path, to_location
from tpuconv.names import MANIFEST
from tpuconv.options import PROGRESS_ARGUMENT, argument, option, takes
from tpuconv.progress import Listener, Progress, ignore
from tpuconv.text import OneLine, format_count

if TYPE_CHECKING:
    from tpuconv.verify.checksums import Checked


@dataclass(frozen=True, repr=False)
class Verification(OneLine):
    """The result of `verify`.

    Attributes:
        checkpoint: the folder that was checked.
        arrays: the number of checked arrays.
        files: the number of other checked files.
        bytes: the bytes that were read.
        faults: missing, damaged, changed and extra files.
        updated: files that were recorded in the manifest; None without `update`.
        seconds: wall-clock time.
    """

    checkpoint: Location
    arrays: int
    files: int
    bytes: int
    faults: Sequence["Checked"]
    updated: Sequence[str] | None
    seconds: float

    @property
    def passed(self) -> bool:
        return not self.faults

    def check(self) -> None:
        """Raises CorruptOutput if there are faults."""
        if self.faults:
            from tpuconv.verify.checksums import what_to_do

            raise CorruptOutput(
                f"the output {self.checkpoint} has {format_count(len(self.faults), 'fault')}",
                details=shorten([f"{each.name} {each.fault}" for each in self.faults]),
                hint="; ".join(what_to_do(self.faults, is_updatable=self.arrays > 0)),
            )

    def to_json(self) -> dict[str, Any]:
        """Returns the keys that docs/json.md lists."""
        return {
            "passed": self.passed,
            "checkpoint": str(self.checkpoint),
            "arrays": self.arrays,
            "files": self.files,
            "bytes": self.bytes,
            "faults": [{"name": each.name, "fault": each.fault} for each in self.faults],
            **({"updated": list(self.updated)} if self.updated is not None else {}),
        }


@dataclass(eq=False, repr=False)
class VerifyRequest:
    """The arguments of `verify`."""

    ckpt: str | Location = field(metadata=argument("The folder of a checkpoint or an export."))
    _: KW_ONLY
    update: bool = option(
        False, "First record the current config.json, tokenizer files and model cards in the manifest."
    )
    key: Path | None = option(
        None, "Check the signature model.sig too, by this public key (PEM): the files are as they were signed."
    )
    progress: Listener = field(default=ignore, metadata=PROGRESS_ARGUMENT)


@takes(VerifyRequest)
def verify(asked: VerifyRequest) -> Verification:
    """Reads every array and file of a checkpoint, or of an export, and compares it with the manifest.

    Raises:
        UsageError: the folder is a release, or was not written by tpuconv, or `key` is given and it has no signature.
        CorruptOutput: its manifest cannot be understood, or the signature is not valid.
    """
    from tpuconv.checkpoint.manifest import PARAMS, read_manifest
    from tpuconv.sources.files import CONFIG_FILE
    from tpuconv.storage.places import is_there
    from tpuconv.storage.sealed import SAFETENSORS, kind_of, read_sealed
    from tpuconv.verify import checksums
    from tpuconv.verify.signature import check_signature

    folder = to_location(asked.ckpt)
    is_ours = is_there(folder / MANIFEST) or is_there(folder / PARAMS)  # a checkpoint may have lost its manifest
    if not is_ours and is_there(folder / CONFIG_FILE):
        raise UsageError(
            f"{folder} is a release: it has no checksums of tpuconv",
            hint=f"`tpuconv verify {folder} --compare-hf` compares its model with transformers; "
            f"`tpuconv convert {folder}` makes a checkpoint with checksums",
        )
    if asked.key:
        asked.progress(Progress("checking the signature"))
        check_signature(local_path(folder, "signatures are checked in local folders"), Path(asked.key))
    updated = checksums.update(read_manifest(folder)) if asked.update else None
    began = time.monotonic()
    if kind_of(folder) == SAFETENSORS:
        sealed = read_sealed(folder)
        checks, arrays = checksums.check_export(folder, sealed), 0
        total = sum(facts["bytes"] for facts in sealed.files.values())
    else:
        manifest = read_manifest(folder)
        checks, arrays, total = checksums.check_checkpoint(manifest), len(manifest.arrays), int(manifest.raw["bytes"])
    checked, done = [], 0
    for each in checks:
        checked.append(each)
        done += each.nbytes
        asked.progress(Progress("checking", min(done, total), total))
    faults = [each for each in checked if each.fault]
    return Verification(folder, arrays, len(checked) - arrays, done, faults, updated, time.monotonic() - began)
