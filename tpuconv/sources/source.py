"""The source checkpoint: a folder of safetensors files, with all headers read and checked.

What the safetensors library lets pass and a converter must not (a tensor twice, overlapping or missing ranges, names
that climb out of the folder) is refused here.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuconv.errors import SourceError, UsageError, shorten
from tpuconv.sources.companions import check_inside, find_companions
from tpuconv.sources.config import encoding_of, read_config
from tpuconv.sources.damaged import check_promise
from tpuconv.sources.files import CONFIG_FILE, INDEX_FILE
from tpuconv.sources.headers import TensorInfo, read_header
from tpuconv.sources.index import read_index
from tpuconv.sources.reader import Reader, SafetensorsReader
from tpuconv.sources.shard import SourceShard, read_digest
from tpuconv.storage.sealed import copy_file
from tpuconv.text import has_surrogates, plain

VERIFIED = "by the sha256 that the Hub promises"
"""VERIFIED, UNVERIFIED and UNREAD: what a manifest says about whether the source's bytes are the published ones."""
UNVERIFIED = "unverified: no hash was published"
UNREAD = "unverified: only a part of it was read"


@dataclass(frozen=True)
class Source:
    """A checkpoint folder whose headers were read and checked.

    Attributes:
        repo, commit: where it comes from on the Hub.
        companions: size and hash of the files that go with the weights, as a manifest has them.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: tuple[SourceShard, ...]
    repo: str | None = None
    commit: str | None = None
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The files that go with the weights, with size and hash as a manifest has them."""

    hashed = True
    """Whether its shards are hashed while they are read."""

    @property
    def encoding(self) -> Mapping[str, Any] | None:
        """What config.json says about how the weights are encoded; None if nothing."""
        return encoding_of(self.config)

    def origin(self, sha256: Mapping[str, str | None]) -> dict[str, Any]:
        """What the manifest says about the source. `sha256` has the hash of each shard, None if it was not hashed."""
        folder = self.folder.resolve()  # a name that is no text has no place in JSON
        return {
            "name": plain(self.name),
            "repo": self.repo,
            "commit": self.commit,
            "folder": None if self.repo or has_surrogates(str(folder)) else str(folder),
            "shards": {s.name: {"bytes": s.size, "sha256": sha256[s.name], "stamp": s.stamp} for s in self.shards},
            "verified": self._verified(sha256),
            "tensors": len(self.tensors),
            "bytes": self.nbytes,
        }

    def _verified(self, sha256: Mapping[str, str | None]) -> str:
        if not all(s.sha256 for s in self.shards):
            return UNVERIFIED
        return VERIFIED if all(sha256[s.name] == s.sha256 for s in self.shards) else UNREAD

    def open(self, check_cancelled: Callable[[], None] = lambda: None, *, hashes: bool = True) -> Reader:
        """A reader of the weights. `check_cancelled` raises when the work is to stop; `hashes` says whether shards are
        hashed while they are read."""
        return SafetensorsReader(self.folder, self.shards, check_cancelled, hashes=hashes)

    def start_checks(self) -> Sequence[Future[None]]:
        """Begins to check what can be checked beside other work; the results raise what is wrong. Empty if there is
        nothing to check before a tensor is read."""
        return ()

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        """Where the bytes of a tensor are: file, first byte and number of bytes."""
        return [(self.folder / info.shard, info.offset, info.nbytes)]

    def copy_companion(self, name: str, target: Path) -> None:
        """Copies a file that goes with the weights. Raises SourceError if it was changed."""
        copy_file(self.folder / name, target, self.companions[name])

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def name(self) -> str:
        """The name of the model: of the repository, or of the folder."""
        return self.repo.split("/")[-1] if self.repo else self.folder.resolve().name


def open_source(
    folder: Path, *, repo: str | None = None, commit: str | None = None, sha256: Mapping[str, str] | None = None
) -> Source:
    """Reads config.json, the index and all headers of a checkpoint.

    Args:
        folder: the checkpoint.
        repo, commit: where it comes from on the Hub.
        sha256: what the Hub promises for files, by name.

    Raises:
        UsageError: the folder does not exist, or holds no checkpoint.
        ConfigError: config.json is missing, or holds no JSON object.
        SourceError: the index or a header is broken, incomplete or unsafe. All faults are listed.
        DamagedDownload: a broken file does not match its `sha256`.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    if repo is None:
        check_inside(folder, [CONFIG_FILE, INDEX_FILE])
    shard_names, weight_map = read_index(folder)
    if repo is None:
        check_inside(folder, shard_names)
    config = read_config(folder / CONFIG_FILE)
    faults: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    shards = []
    for name in shard_names:
        try:
            size, _, infos = read_header(folder / name)
            digest, own_stamp = read_digest(folder / name)
        except SourceError as error:
            check_promise(folder / name, (sha256 or {}).get(name))  # a download that is damaged is downloaded again
            faults += [error.message, *error.details]
            continue
        shards.append(SourceShard(name, size, digest, own_stamp, (sha256 or {}).get(name)))
        for info in infos:
            if info.name in tensors:
                faults.append(f"{info.name} is in {tensors[info.name].shard} and in {name}")
            elif weight_map is not None and weight_map.get(info.name) != name:
                place = weight_map.get(info.name)
                faults.append(f"{info.name} is in {name}; the index {f'says {place}' if place else 'does not name it'}")
            tensors[info.name] = info
    if not faults:
        placed = (weight_map or {}).items()
        faults += [f"{name} is not in {shard}, where the index has it" for name, shard in placed if name not in tensors]
    if faults:
        raise SourceError(
            f"the checkpoint in {folder} cannot be read safely: {len(faults)} faults"
            if len(faults) > 1
            else f"the checkpoint in {folder} cannot be read safely",
            details=shorten(faults),
            hint="download it again, or ask where it comes from",
        )
    companions = find_companions(folder, trusted=repo is not None)
    return Source(folder, config, tensors, tuple(shards), repo, commit, companions)
