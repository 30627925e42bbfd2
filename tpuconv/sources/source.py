"""The source checkpoint: a folder of safetensors files, with all headers read and checked.

What the safetensors library lets pass and a converter must not (a tensor twice, overlapping or missing ranges, names
that climb out of the folder) is refused here.
"""

import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpuconv.errors import SourceError, UsageError, shorten
from tpuconv.jsonfile import LFS_ADVICE
from tpuconv.location import BucketPath, Location
from tpuconv.sources.companions import LeftOut, check_inside, find_companions
from tpuconv.sources.config import encoding_of, read_config
from tpuconv.sources.damaged import check_download
from tpuconv.sources.files import CONFIG_FILE, INDEX_FILE
from tpuconv.sources.headers import TensorInfo, is_safe_name, read_header
from tpuconv.sources.index import read_index
from tpuconv.sources.ranks import mark_of_rank
from tpuconv.sources.reader import Reader, SafetensorsReader
from tpuconv.sources.remote import ObjectShard, RemoteFile
from tpuconv.sources.repository import Resolved
from tpuconv.sources.shard import SourceShard, read_digest
from tpuconv.sources.stream import StreamReader
from tpuconv.storage.places import names_in
from tpuconv.storage.sealed import copy_file
from tpuconv.storage.sinks import Sink
from tpuconv.text import plain

VERIFIED = "by the hashes that the Hub promises"
"""This and the next three: what a manifest says about whether the source's bytes are the published ones."""
UNVERIFIED = "unverified: no hash was published"
UNREAD = "unverified: only a part of it was read"
NOT_PERMITTED = os.strerror(errno.EACCES)
CHANGED = "unverified: saved from a model, whose weights may differ from the source's"


@dataclass(frozen=True)
class Source:
    """A checkpoint folder whose headers were read and checked.

    Attributes:
        repo, commit: where it comes from on the Hub.
        companions: size and hash of the files that go with the weights, as a manifest has them.
    """

    folder: Location
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    shards: tuple[SourceShard, ...]
    repo: str | None = None
    commit: str | None = None
    companions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The files that go with the weights, with size and hash as a manifest has them."""
    unproved: tuple[str, ...] = ()
    """The files beside the weights for which the Hub promises no hash. Those of the Hub that are not named here had the
    hash that it promises."""
    left_out: tuple[LeftOut, ...] = ()
    """The files that are neither weights that are read nor companions."""
    remote: Mapping[str, RemoteFile] = field(default_factory=dict, compare=False)
    """The shards that are fetched while they are read, by name; see `fetched_meanwhile`."""
    workspace: Path | None = None
    """The folder for what was fetched; None to choose it."""

    not_finite_hint = (
        "the checkpoint is damaged, or `dtype=` too small for its values: download it again, try float32, or give "
        "`allow_nonfinite=True` to convert it as it is, each with `overwrite=True` to begin anew"
    )
    """What to do where values are NaN or infinite."""
    hashed = True
    """True if the shards are hashed while they are read."""

    @property
    def skipped_before(self) -> Sequence[Mapping[str, Any]]:
        """For a checkpoint: the tensors that the earlier conversion skipped, from its manifest."""
        return ()

    @property
    def encoding(self) -> Mapping[str, Any] | None:
        """The description of the encoding of the weights in config.json; None if there is none."""
        return encoding_of(self.config)

    @property
    def stamps(self) -> dict[str, str]:
        """The stamp of each shard, by its name."""
        return {shard.name: shard.stamp for shard in self.shards}

    @property
    def promised(self) -> list[SourceShard]:
        """The shards on a disk whose sha256 the Hub promises."""
        return [shard for shard in self.shards if shard.sha256 and shard.name not in self.remote]

    def origin(self, hashes: Mapping[str, str | None]) -> dict[str, Any]:
        """Returns what the manifest says about the source: nothing of the machine or the folder. `hashes` has the hash
        of each shard, that of `hash_name`; None if it was not hashed."""
        return {
            "name": plain(self.title),
            "repo": self.repo,
            "commit": self.commit,
            "shards": {s.name: {"bytes": s.size, "sha256": None, s.hash_name: hashes[s.name]} for s in self.shards},
            "verified": self._verified(hashes),
            "tensors": len(self.tensors),
            "bytes": self.nbytes,
        }

    def _verified(self, hashes: Mapping[str, str | None]) -> str:
        if self.unproved or not all(s.sha256 for s in self.shards):
            return UNVERIFIED
        return VERIFIED if all(hashes[s.name] == s.sha256 for s in self.shards) else UNREAD

    def open(
        self, check_cancelled: Callable[[], None] = lambda: None, *, hashes: Collection[str] | None = None
    ) -> Reader:
        """Returns a reader of the weights. `check_cancelled` raises when the work is to stop; `hashes` are the shards
        to be hashed while they are read, all if None."""
        here = SafetensorsReader(self.folder, self.shards, check_cancelled, hashes=hashes)
        if not self.remote:
            return here
        identity = f"{self.repo} {self.commit} {[(s.name, s.size, s.stamp) for s in self.shards]}"
        return StreamReader(self.remote, self.shards, here, identity, self.workspace, check_cancelled)

    def start_checks(self) -> Sequence[Future[None]]:
        """Begins to check what can be checked beside other work; the results raise what is wrong. Empty if there is
        nothing to check before a tensor is read."""
        return ()

    def files(self, info: TensorInfo) -> list[tuple[Path, int, int]]:
        """Returns the place of a tensor's bytes on a disk: file, first byte and number of bytes. It is empty if they
        are not on a disk."""
        if isinstance(self.folder, BucketPath) or info.shard in self.remote:
            return []
        return [(self.folder / info.shard, info.offset, info.nbytes)]

    def copy_companion(self, name: str, sink: Sink, target: str) -> None:
        """Copies a file that goes with the weights into an output, as `target`. Raises SourceError if it was
        changed."""
        copy_file(self.folder / name, sink, target, self.companions[name])

    @property
    def nbytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def name(self) -> str:
        """The name of the model in messages: of the repository, or of the folder."""
        return self.repo.split("/")[-1] if self.repo else self.folder.resolve().name

    @property
    def title(self) -> str:
        """The name of the model in an output: of the repository, else of the architecture. Copies of one source may lie
        in folders of any name."""
        named = self.config.get("architectures")
        first = named[0] if isinstance(named, list) and named else None
        return self.name if self.repo else str(first or self.config.get("model_type"))


def fetched_meanwhile(source: Source, files: Mapping[str, RemoteFile] | None, workspace: Path | None) -> Source:
    """Returns the source with shards that are fetched while they are read: the shards of the Hub by name, or all in a
    bucket.

    What the Hub promises identifies its shards: here they have only headers.
    """
    if isinstance(source.folder, BucketPath):
        objects = {shard.name: ObjectShard(source.folder / shard.name, shard.stamp) for shard in source.shards}
        return replace(source, remote=objects, workspace=workspace)
    remote = dict(files or {})
    shards = [replace(s, digest="", stamp=f"{s.sha256}") if s.name in remote else s for s in source.shards]
    return replace(source, shards=tuple(shards), remote=remote, workspace=workspace)


def open_source(
    folder: Location,
    *,
    repo: str | None = None,
    commit: str | None = None,
    sha256: Mapping[str, str] | None = None,
    unproved: tuple[str, ...] = (),
    listed: Collection[str] = (),
) -> Source:
    """Reads config.json, the index and all headers of a checkpoint.

    Args:
        folder: the checkpoint.
        repo, commit: where it comes from on the Hub.
        sha256: what the Hub promises for weights, by name.
        unproved: the other files for which it promises nothing.
        listed: all files that the Hub has.

    Raises:
        UsageError: the folder does not exist, or holds no checkpoint.
        ConfigError: config.json is missing, or holds no JSON object.
        SourceError: the index or a header is broken, incomplete or unsafe. All faults are listed.
        DamagedDownload: a broken file does not match its `sha256`.
    """
    if isinstance(folder, Path) and not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    if repo is None:
        check_inside(folder, [CONFIG_FILE, INDEX_FILE])
    shard_names, weight_map, metadata = read_index(folder)
    said = dict(metadata)
    if repo is None:
        check_inside(folder, shard_names)
    config = read_config(folder / CONFIG_FILE)
    faults: list[str] = []
    tensors: dict[str, TensorInfo] = {}
    shards = []
    for name in shard_names:
        try:
            size, metadata, infos = read_header(folder / name)
            digest, stamp = read_digest(folder / name)
        except SourceError as error:
            if (promised := (sha256 or {}).get(name)) is not None:  # a damaged download is downloaded again
                check_download(folder / name, ("sha256", promised))
            faults += [error.message, *error.details]
            continue
        said |= metadata
        shards.append(SourceShard(name, size, digest, stamp, (sha256 or {}).get(name)))
        mark = mark_of_rank(name)
        for info in (replace(each, name=each.name + mark) for each in infos) if mark else infos:
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
            hint="give this user the right to read the files"
            if all(NOT_PERMITTED in fault for fault in faults)
            else LFS_ADVICE
            if all("Git LFS pointer" in fault for fault in faults)
            else "download it again, or ask where it comes from; save a model of your own again, with its index",
        )
    tensors |= _shared(tensors, said)
    weights = {*shard_names, *([INDEX_FILE] if weight_map is not None else [])}
    beside = find_companions(folder, trusted=repo is not None, weights=weights, listed=listed)
    return Source(folder, config, tensors, tuple(shards), repo, commit, beside.copied, unproved, beside.left_out)


def _shared(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The further names of tensors. `save_model` of safetensors and of huggingface_hub write a tensor that several
    modules share once, perhaps under the name of a tied head, and in the metadata that name for each of the others.
    Raises SourceError if most names are such."""
    further = {
        name: kept
        for name, kept in metadata.items()
        if isinstance(kept, str) and kept in tensors and name not in tensors and is_safe_name(name)
    }
    if len(further) > len(tensors):
        raise SourceError(
            f"the metadata has {len(further):,} further names of {len(tensors):,} tensors",
            hint="do not trust this checkpoint",
        )
    return {name: replace(tensors[kept], name=name) for name, kept in further.items()}


def open_described(resolved: Resolved) -> Source:
    """Returns the source in a folder; without tensors if the folder has config.json and no safetensors.

    Raises:
        TpuconvError: see `open_source`.
    """
    folder, repo = resolved.folder, resolved.repo
    if (isinstance(folder, Path) and not folder.is_dir()) or any(n.endswith(".safetensors") for n in names_in(folder)):
        return open_source(folder, repo=repo, commit=resolved.commit)
    config = read_config(folder / CONFIG_FILE)
    return Source(folder, config, {}, (), companions=find_companions(folder).copied)
