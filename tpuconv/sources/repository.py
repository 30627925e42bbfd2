"""One repository of the Hub at one revision, and its place in the client's cache.

Files, cache, token, endpoint, mirrors, Xet and offline mode are of `huggingface_hub`. Here it is decided which files
are needed, and each is compared with what the Hub promises.
"""

import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tpuconv.errors import HubError, PushedCheckpoint, ResourceError, SourceError
from tpuconv.location import Location
from tpuconv.names import MANIFEST
from tpuconv.sources.companions import CARD, MODULES, module_folders, why_left_out
from tpuconv.sources.damaged import GIT_SHA1, DamagedDownload, Promise, check_download, damaged, link_targets
from tpuconv.sources.download import DownloadProgress, Meter, fetch_file, first_bytes, in_threads
from tpuconv.sources.files import CONFIG_FILE, ENCODING_FILES, INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE
from tpuconv.sources.hub_errors import is_unreachable, raise_unreachable
from tpuconv.sources.index import choose_shards, describe_missing, other_kind, read_weight_map
from tpuconv.sources.remote import HubShard
from tpuconv.text import format_count, format_size, some

WORKERS = 8  # files at a time
SHOWN_FILES = 5
HEADER_PEEK = 128 << 10  # holds the header of most shards, so that one request is enough


@dataclass(frozen=True)
class Resolved:
    """The folder of a checkpoint. From the Hub also the id, the commit and the sha256 that the Hub promises for its
    weights; the files beside them have been compared with its promises, except those in `unproved`, which have none.

    Close it, or use it in a `with`: the temporary folder of `resolve(weights=False)` is removed then.
    """

    folder: Location
    repo: str | None = None
    commit: str | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    unproved: tuple[str, ...] = ()
    listed: tuple[str, ...] = field(default=(), compare=False)
    """The names of all files that the Hub has; none if it cannot be asked."""
    remote: dict[str, HubShard] = field(default_factory=dict, compare=False)
    """The shards of `headers_only` that are not here, by name."""
    _temporary: "TemporaryDirectory[str] | None" = field(default=None, repr=False, compare=False)

    @property
    def headers_only(self) -> bool:
        """True if the shards hold only headers."""
        return self._temporary is not None

    def close(self) -> None:
        """Removes the temporary folder, if there is one."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> "Resolved":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class HubFile:
    """A file in the listing of a repository. `sha256` is None for files that git itself stores, which have a
    `git_sha1`."""

    name: str
    size: int
    sha256: str | None
    git_sha1: str | None = None

    @property
    def promise(self) -> Promise | None:
        """The hash that the Hub lists; None if it lists none."""
        if self.sha256 is not None:
            return "sha256", self.sha256
        return None if self.git_sha1 is None else (GIT_SHA1, self.git_sha1)


class Repository:
    """One repository at one revision, and its place in the cache."""

    def __init__(self, repo: str, revision: str):
        from huggingface_hub import constants

        from tpuconv.private import repo_folder_name

        self.repo = repo
        self.revision = revision
        self.storage: Path = Path(constants.HF_HUB_CACHE).expanduser().resolve() / repo_folder_name(
            repo_id=repo, repo_type="model"
        )
        self.meter = Meter(None)

    def snapshot(self, commit: str) -> Path:
        """Returns the cache folder of a commit."""
        return self.storage / "snapshots" / commit

    def config(self) -> Path:
        """Returns the path of config.json in the cache, with what stands beside it about encodings. Works offline if it
        is cached."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        try:  # the client would retry many times and print a warning each time
            commit, files = self._listing()
        except Exception as error:
            cached = try_to_load_from_cache(self.repo, CONFIG_FILE, revision=self.revision)
            if is_unreachable(error) and isinstance(cached, str):
                return Path(cached)
            raise
        self._remember(commit)
        if CONFIG_FILE not in files:
            return Path(hf_hub_download(self.repo, CONFIG_FILE, revision=commit))  # raises the client's error
        for name in (CONFIG_FILE, *ENCODING_FILES):
            if name in files:
                self._proved(commit, files[name])
        return self.snapshot(commit) / CONFIG_FILE

    def fetch(self, names: Collection[str] | None = None) -> Path:
        """Returns the repository's folder in the cache, with the files of these names, by default all. Works offline if
        something of it is cached."""
        try:
            commit, files = self._listing()
        except Exception as error:
            if is_unreachable(error):
                return self._cached(error)[1]
            raise
        self._remember(commit)
        if names is not None:
            self._in_parallel(lambda f: self._proved(commit, f), [files[name] for name in names if name in files])
            return self.snapshot(commit)
        # The hashes of arrays stand in the manifest too.
        self._check_disk([f for f in files.values() if not self._is_cached(commit, f)])
        self._in_parallel(lambda f: (self._by_client if f.sha256 else self._proved)(commit, f), files.values())
        return self.snapshot(commit)

    def resolve(self, weights: bool, progress: DownloadProgress | None, *, streams: bool = False) -> Resolved:
        """Returns the checkpoint's folder in the cache, downloaded as far as needed. See
        `tpuconv.sources.hub.resolve`."""
        try:
            commit, files = self._listing()
        except Exception as error:
            if is_unreachable(error):
                return self._from_cache(error)
            raise
        self._remember(commit)
        self._check_weights(files)
        modules = self._modules(commit, files)
        companions = [f for f in files.values() if _is_wanted(f.name, modules)]
        if INDEX_FILE in files:
            self._proved(commit, files[INDEX_FILE])
            companions.append(files[INDEX_FILE])
        shards = self._shards(commit, files)
        snapshot = self.snapshot(commit)
        missing = [f for f in shards if not self._is_cached(commit, f)]
        self.meter = Meter(progress)
        for f in [*companions, *shards]:
            self.meter.expect(f.name, f.size if weights or f in companions else min(f.size, HEADER_PEEK))
        promised = {f.name: f.sha256 for f in shards if f.sha256}
        unproved = tuple(sorted(f.name for f in companions if f.promise is None))

        self._in_parallel(lambda f: self._proved(commit, f), companions)
        if streams:  # git's own files have no sha256
            downloaded = [f for f in missing if not f.sha256]
            self._check_disk(downloaded)
            self._in_parallel(lambda f: self._by_client(commit, f), downloaded)
            missing = [f for f in missing if f not in downloaded]
        if weights or not missing:
            self._check_disk(missing)
            self._in_parallel(lambda f: self._by_client(commit, f), shards)
            self.meter.finish()
            return Resolved(snapshot, self.repo, commit, promised, unproved, tuple(files))

        temporary = TemporaryDirectory(prefix="tpuconv-headers-", ignore_cleanup_errors=True)
        try:
            folder = Path(temporary.name)
            for f in companions:
                (folder / f.name).parent.mkdir(parents=True, exist_ok=True)
                (folder / f.name).symlink_to(snapshot / f.name)
            self._in_parallel(lambda f: self._lay_out(commit, f, folder), shards)
            remote = {f.name: HubShard(self.repo, self.revision, commit, f.name, folder / f.name) for f in missing}
        except BaseException:
            temporary.cleanup()
            raise
        self.meter.finish()
        return Resolved(folder, self.repo, commit, promised, unproved, tuple(files), remote, temporary)

    def _listing(self) -> tuple[str, dict[str, HubFile]]:
        from huggingface_hub import HfApi, constants

        info = HfApi().model_info(
            self.repo, revision=self.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        if not re.fullmatch("[0-9a-f]{40}", info.sha or "") or info.siblings is None:
            raise HubError(f"the Hub at {constants.ENDPOINT} lists {self.repo} without commit or files")
        files = {}
        for s in info.siblings:
            sha256 = s.lfs.sha256 if s.lfs and re.fullmatch("[0-9a-f]{64}", s.lfs.sha256) else None
            is_git = not s.lfs and re.fullmatch("[0-9a-f]{40}", s.blob_id or "")
            size = (s.lfs.size if s.lfs else s.size) or 0
            files[s.rfilename] = HubFile(s.rfilename, size, sha256, s.blob_id if is_git else None)
        return str(info.sha), files

    def _remember(self, commit: str) -> None:
        """Records in the cache, as the client does, the commit of the revision, so that it is found offline."""
        ref = self.storage / "refs" / self.revision
        if self.revision == commit or (ref.is_file() and ref.read_text() == commit):
            return
        with suppress(OSError):  # a complete cache may be one that only others may write
            ref.parent.mkdir(parents=True, exist_ok=True)
            part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            part.write_text(commit)
            part.replace(ref)

    def _check_weights(self, files: dict[str, HubFile]) -> None:
        if INDEX_FILE in files or choose_shards(files, None)[0]:
            return
        weights = sorted(name for name in files if name.endswith(".safetensors"))
        if weights:
            raise SourceError(
                f"{self.repo} has neither {SINGLE_FILE} nor {INDEX_FILE}",
                details=["it has " + some(weights, SHOWN_FILES)],
                hint="it is not a checkpoint of a transformers model; adapters and pipelines cannot be converted",
            )
        if MANIFEST in files:
            raise PushedCheckpoint(
                f"{self.repo} holds a checkpoint of tpuconv, not a release",
                hint=f"`hf download {self.repo} --local-dir {self.repo.rpartition('/')[2]}` downloads it; "
                "`tpuconv generate` and `tpuconv benchmark` take its id too",
            )
        kinds = [f"{n} x {kind}" for kind, n in Counter(Path(name).suffix or name for name in files).most_common()]
        other = other_kind({name.partition("/")[0] for name in files})
        raise SourceError(
            f"{self.repo} holds no safetensors at revision {self.revision}",
            details=[
                *(["it has " + some(kinds, SHOWN_FILES)] if kinds else ()),
                *([f"it holds {other[0]}"] if other else ()),
            ],
            hint=other[1]
            if other
            else "look for a safetensors version of this model, or save it as one with transformers",
        )

    def _shards(self, commit: str, files: dict[str, HubFile]) -> list[HubFile]:
        weight_map = read_weight_map(self.snapshot(commit) / INDEX_FILE) if INDEX_FILE in files else None
        names, by_index = choose_shards(files, weight_map)
        if by_index and (lost := [name for name in names if name not in files]):
            raise SourceError(
                f"{INDEX_FILE} of {self.repo} names {format_count(len(lost), 'file')} that it does not have",
                details=describe_missing(by_index, lost),
                hint="the repository is incomplete: tell its owner, or take another revision",
            )
        return [files[name] for name in names]

    def _modules(self, commit: str, files: Mapping[str, HubFile]) -> list[str]:
        """Returns the folders of modules of sentence-transformers."""
        if MODULES not in files:
            return []
        self._proved(commit, files[MODULES])
        return module_folders(self.snapshot(commit))

    def _is_cached(self, commit: str, file: HubFile) -> bool:
        path = self.snapshot(commit) / file.name
        if not path.exists():
            return False
        if file.size and path.stat().st_size != file.size:
            raise damaged(path, f"size promised  {file.size}", f"size found     {path.stat().st_size}")
        return True

    def _check_disk(self, missing: Sequence[HubFile]) -> None:
        blobs = self.storage / "blobs"
        need = sum(f.size for f in missing if not (f.sha256 and (blobs / f.sha256).exists()))
        self.storage.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.storage).free
        if need > free:
            raise ResourceError(
                f"the download of {self.repo} takes {format_size(need)} more, and {format_size(free)} are free",
                details=[f"in the cache at {self.storage.parent}"],
                hint="make room (`hf cache ls`, `hf cache rm`), or set HF_HOME to a larger disk",
            )

    # --- the files -------------------------------------------------------------------------------------------------

    def _in_parallel(self, work: Callable[[HubFile], None], files: Iterable[HubFile]) -> None:
        """Calls `work` for each file, a few at a time. The first error, or Ctrl-C, stops all others."""
        with closing(in_threads(work, files, WORKERS, self.meter.stopped)) as done:
            for file in done:
                self.meter.complete(file.name)

    def _by_client(self, commit: str, file: HubFile) -> None:
        """Fetches a file with the client, or links it into the snapshot if its blob is there."""
        if not self._is_cached(commit, file):
            fetch_file(self.repo, file.name, commit, self.meter)

    def _proved(self, commit: str, file: HubFile) -> None:
        """Fetches a file that goes with the weights, and compares it with what the Hub promises. A file that differs is
        fetched again, once.

        Raises:
            DamagedDownload: it differs again, or cannot be fetched again.
        """
        try:
            self._by_client(commit, file)
            check_download(self.snapshot(commit) / file.name, file.promise)
        except DamagedDownload as error:
            error.remove()
            self._by_client(commit, file)
            check_download(self.snapshot(commit) / file.name, file.promise)

    def _lay_out(self, commit: str, file: HubFile, folder: Path) -> None:
        """Writes a shard's header, followed by a hole of the weights' size; a link if the shard is in the cache."""
        from huggingface_hub import hf_hub_url

        if self._is_cached(commit, file):
            (folder / file.name).symlink_to(self.snapshot(commit) / file.name)
            return
        url = hf_hub_url(self.repo, file.name, revision=commit)
        head = first_bytes(url, min(HEADER_PEEK, file.size), self.meter.stopped)
        end = 8 + int.from_bytes(head[:8], "little")
        if len(head) < end <= min(file.size, 8 + MAX_HEADER_BYTES):  # else `read_header` says what it is
            head = first_bytes(url, end, self.meter.stopped)
        with open(folder / file.name, "wb") as out:
            out.write(head[:end])
            out.truncate(file.size)

    # --- without network -------------------------------------------------------------------------------------------

    def _cached(self, cause: Exception) -> tuple[str, Path]:
        """Returns the commit of the revision and its folder in the cache, as far as it is there."""
        ref = self.storage / "refs" / self.revision
        commit = self.revision if re.fullmatch("[0-9a-f]{40}", self.revision) else ""
        if not commit and ref.is_file():
            commit = ref.read_text().strip()
        snapshot = self.snapshot(commit)
        if not commit or not snapshot.is_dir():
            raise_unreachable(
                self.repo, cause, f"the cache at {self.storage.parent} has nothing of it at revision {self.revision}"
            )
        return commit, snapshot

    def _from_cache(self, cause: Exception) -> Resolved:
        """Returns the snapshot in the cache, if it is complete. The client names blobs by the hashes that the Hub
        promises."""
        commit, snapshot = self._cached(cause)
        promised: dict[str, str] = {}
        unproved: list[str] = []
        modules = module_folders(snapshot)
        for path in sorted(path for path in snapshot.rglob("*") if path.is_file()):
            name = path.relative_to(snapshot).as_posix()
            # Of a file shared by repositories, the next target has another hash.
            blob = link_targets(path)[0].name if path.is_symlink() else ""
            kind = {64: "sha256", 40: GIT_SHA1}.get(len(blob)) if re.fullmatch("[0-9a-f]+", blob) else None
            if "/" not in name and path.suffix == ".safetensors":
                promised |= {name: blob} if kind == "sha256" else {}
            elif not _is_wanted(name, modules) and name != INDEX_FILE:
                continue
            elif kind is None:
                unproved.append(name)
            else:
                check_download(path, (kind, blob))
        needed = self._needed(snapshot)
        if missing := [name for name in needed if not (snapshot / name).exists()]:
            have = f"{len(needed) - len(missing)} of the {len(needed)} files needed"
            raise_unreachable(self.repo, cause, f"the cache has {have}, without {some(missing, SHOWN_FILES)}")
        return Resolved(snapshot, self.repo, commit, promised, tuple(unproved))

    def _needed(self, snapshot: Path) -> list[str]:
        index = snapshot / INDEX_FILE
        names = [path.name for path in snapshot.iterdir()]
        shards, by_index = choose_shards(names, read_weight_map(index) if index.exists() else None)
        if by_index:
            return [CONFIG_FILE, INDEX_FILE, *shards]
        if not index.exists() and any(snapshot.glob("*-of-*.safetensors")):
            return [CONFIG_FILE, INDEX_FILE]
        return [CONFIG_FILE, *(shards or [SINGLE_FILE])]


def _is_wanted(name: str, modules: Collection[str]) -> bool:
    """Returns True if a conversion uses this file besides the weights."""
    return name == CARD or why_left_out(name, modules) is None
