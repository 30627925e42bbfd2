"""From the name of a checkpoint to a folder that holds it: a local folder as it is, a Hub id by download.

Cache, token, endpoint and offline mode are those of `huggingface_hub`. Weights are fetched here instead: the client
throws a partial file away when it is interrupted (2.4.0), and a shard has gigabytes. A partial file lies beside the
client's blobs until it is whole, and the client then links it into the snapshot.
"""

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tpuconv.errors import HubError, ResourceError, SourceError, UsageError
from tpuconv.sizes import format_size
from tpuconv.sources.companions import CARD, is_companion
from tpuconv.sources.damaged import damaged, link_targets
from tpuconv.sources.download import TICK_SECONDS, Meter, Progress, chunks_of, lock
from tpuconv.sources.hub_errors import client_errors, is_unreachable, near_folders, raise_unreachable
from tpuconv.text import plain

WORKERS = 8  # files at a time
HEADER_PEEK = 128 << 10  # holds the header of most shards, so that one request is enough


@dataclass(frozen=True)
class Resolved:
    """A checkpoint's folder; of a Hub checkpoint also the id, the commit and the sha256 that the Hub promises of files.

    Close it, or use it in a `with`: what `resolve(weights=False)` laid out is removed.
    """

    folder: Path
    repo: str | None = None
    commit: str | None = None
    sha256: dict[str, str] = field(default_factory=dict)
    _temporary: "TemporaryDirectory[str] | None" = field(default=None, repr=False, compare=False)

    @property
    def headers_only(self) -> bool:
        """Whether the shards are headers followed by holes."""
        return self._temporary is not None

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> "Resolved":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def resolve(
    src: str, *, revision: str | None = None, weights: bool = True, progress: Progress | None = None
) -> Resolved:
    """The folder of a checkpoint, downloaded first if `src` is a Hub id.

    Args:
        src: a folder, or a Hub id as `name` or `org/name`. A folder that exists goes first.
        revision: a branch, tag or commit of the Hub repository.
        weights: if false, of each shard that is not in the cache only the header is fetched; the folder then is a
            temporary one whose shards have their full size and holes for weights.
        progress: called with bytes there and bytes in all, from any thread, one call at a time.

    Raises:
        UsageError: `src` is neither, or a path that the system refuses.
        HubError: the Hub refused, does not know it, or cannot be reached.
        SourceError: the repository holds no safetensors checkpoint, or the cache a damaged file.
        ResourceError: the disk is too small or the cache cannot be written.
    """
    folder = _local_path(src)
    if src and folder.is_dir():
        if revision is not None:
            raise UsageError(
                f"--revision {revision} goes with a Hub id, and {src} is a folder",
                hint="leave it out, or run where no folder has this name",
            )
        return Resolved(folder)
    _check_id(src, folder)
    if revision is not None and (".." in revision or not re.fullmatch(r"[^\s/\\-][^\s\\]*", revision)):
        raise UsageError(f"{revision!r} is no branch, tag or commit")
    with client_errors(src, revision or "main"):
        return _Hub(src, revision or "main").resolve(weights, progress)


def fetch_config(src: str, revision: str | None = None) -> dict[str, Any]:
    """config.json of a folder or a Hub id, or `src` itself where it is such a file, as `read_config` has it. Nothing
    else is read.

    Raises:
        UsageError: `src` is none of these, or a path that the system refuses.
        ConfigError: config.json is missing or no JSON object.
        HubError: the Hub refused, does not know it, or cannot be reached.
    """
    from tpuconv.sources.source import CONFIG_FILE, read_config

    path = _local_path(src)
    if src and (path.is_dir() or path.suffix == ".json"):
        return read_config(path / CONFIG_FILE if path.is_dir() else path)
    _check_id(src, path)
    with client_errors(src, revision or "main"):
        return read_config(_Hub(src, revision or "main").config())


# --- what the user typed -------------------------------------------------------------------------------------------


def _local_path(src: str) -> Path:
    """The path that `src` is, if it is one: there may be nothing.

    Raises:
        UsageError: the system refuses to look there (a name too long, a NUL, a folder that others may not search), or
            knows no such user (`~user`).
    """
    try:
        path = Path(src).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, ValueError, RuntimeError) as e:
        shown = repr(src) if len(src) < 200 else f"{src[:60]!r}..., of {len(src)} characters,"
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise UsageError(f"{shown} cannot be read: {reason}", hint="give a folder or a Hub id: org/name") from e
    return path


def _check_id(src: str, path: Path) -> None:
    """Raises UsageError if `src` cannot be a Hub id."""
    if match := re.match(r"(?:https?://[^/]+/|hf://(?:models/)?)([^/]+/[^/@]+)", src):
        raise UsageError(f"{src} is an address", hint=f"give the id alone: {match[1]}")
    if path.is_file():
        raise UsageError(f"{src} is a file", hint=f"give the folder of the checkpoint: {plain(str(path.parent))}")
    if not src or src.startswith((".", "/", "~")) or src.endswith("/") or src.count("/") > 1 or "\\" in src:
        if path.parent.is_dir():
            raise UsageError(
                f"there is no folder {src!r}", hint=near_folders(path) or "give a folder or a Hub id: org/name"
            )
        raise UsageError(f"there is no folder {src!r}", hint=f"there is no folder {str(path.parent)!r} either")
    from huggingface_hub.errors import HFValidationError

    from tpuconv.private import validate_repo_id

    try:
        validate_repo_id(src)
    except HFValidationError:
        raise UsageError(
            f"{src!r} is no folder and no Hub id",
            hint=near_folders(path) or "an id is `name` or `org/name`, of letters, digits, '-', '_' and '.'",
        ) from None


# --- a repository of the Hub ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file of the repository's listing. `sha256` is None for what git itself keeps."""

    name: str
    size: int
    sha256: str | None


class _Hub:
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
        return self.storage / "snapshots" / commit

    def config(self) -> Path:
        """config.json, with ModelOpt's file beside it where there is one; of the cache where nobody answers."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        from tpuconv.sources.source import CONFIG_FILE, ENCODING_FILE

        try:  # not left to the client, which tries again and again and says so each time
            commit, files = self._listing()
        except Exception as error:
            cached = try_to_load_from_cache(self.repo, CONFIG_FILE, revision=self.revision)
            if is_unreachable(error) and isinstance(cached, str):
                return Path(cached)
            raise
        self._remember(commit)
        if ENCODING_FILE in files:
            hf_hub_download(self.repo, ENCODING_FILE, revision=commit)
        return Path(hf_hub_download(self.repo, CONFIG_FILE, revision=commit))

    def resolve(self, weights: bool, progress: Progress | None) -> Resolved:
        try:
            commit, files = self._listing()
        except Exception as error:
            if is_unreachable(error):
                return self._from_cache(error)
            raise
        from tpuconv.sources.source import INDEX_FILE

        self._remember(commit)
        companions = [f for f in files.values() if _is_wanted(f.name)]
        self._check_weights(files)
        if INDEX_FILE in files:
            self._by_client(commit, files[INDEX_FILE])
            companions.append(files[INDEX_FILE])
        shards = self._shards(commit, files)
        snapshot = self.snapshot(commit)
        missing = [f for f in shards if not self._is_cached(commit, f)]
        self.meter = Meter(progress)
        for f in [*companions, *shards]:
            self.meter.expect(f.name, f.size if weights or f in companions else min(f.size, HEADER_PEEK))
        promised = {f.name: f.sha256 for f in [*companions, *shards] if f.sha256}

        self._in_parallel(lambda f: self._by_client(commit, f), companions)
        if weights or not missing:
            self._check_disk(missing)
            self._in_parallel(lambda f: self._fetch(commit, f), shards)
            self.meter.finish()
            return Resolved(snapshot, self.repo, commit, promised)

        temporary = TemporaryDirectory(prefix="tpuconv-headers-")
        try:
            folder = Path(temporary.name)
            for f in companions:
                (folder / f.name).symlink_to(snapshot / f.name)
            self._in_parallel(lambda f: self._lay_out(commit, f, folder), shards)
        except BaseException:
            temporary.cleanup()
            raise
        self.meter.finish()
        return Resolved(folder, self.repo, commit, promised, temporary)

    def _listing(self) -> tuple[str, dict[str, _File]]:
        from huggingface_hub import HfApi, constants

        info = HfApi().model_info(
            self.repo, revision=self.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
        if not re.fullmatch("[0-9a-f]{40}", info.sha or "") or info.siblings is None:
            raise HubError(f"the Hub at {constants.ENDPOINT} lists {self.repo} without commit or files")
        files = {}
        for s in info.siblings:
            sha256 = s.lfs.sha256 if s.lfs and re.fullmatch("[0-9a-f]{64}", s.lfs.sha256) else None
            files[s.rfilename] = _File(s.rfilename, (s.lfs.size if s.lfs else s.size) or 0, sha256)
        return str(info.sha), files

    def _remember(self, commit: str) -> None:
        """Notes in the cache, as the client does, which commit the revision is: for the next time without network."""
        ref = self.storage / "refs" / self.revision
        if self.revision == commit or (ref.is_file() and ref.read_text() == commit):
            return
        with suppress(OSError):  # a complete cache may be one that only others may write
            ref.parent.mkdir(parents=True, exist_ok=True)
            part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
            part.write_text(commit)
            part.replace(ref)

    def _check_weights(self, files: dict[str, _File]) -> None:
        from tpuconv.sources.source import INDEX_FILE, SINGLE_FILE

        if INDEX_FILE in files or SINGLE_FILE in files:
            return
        weights = sorted(name for name in files if name.endswith(".safetensors"))
        if weights:
            raise SourceError(
                f"{self.repo} has neither {SINGLE_FILE} nor {INDEX_FILE}",
                details=["it has " + _some(weights)],
                hint="it is no checkpoint of a transformers model; adapters and pipelines cannot be converted",
            )
        kinds = Counter(Path(name).suffix or name for name in files)
        raise SourceError(
            f"{self.repo} holds no safetensors at revision {self.revision}",
            details=["it has " + _some([f"{n} x {kind}" for kind, n in kinds.most_common()])] if kinds else (),
            hint="look for a safetensors version of this model, or save it as one with transformers",
        )

    def _shards(self, commit: str, files: dict[str, _File]) -> list[_File]:
        from tpuconv.sources.source import INDEX_FILE, SINGLE_FILE, describe_missing, read_weight_map

        if INDEX_FILE not in files:
            return [files[SINGLE_FILE]]
        weight_map = read_weight_map(self.snapshot(commit) / INDEX_FILE)
        names = sorted(set(weight_map.values()))
        if lost := [name for name in names if name not in files]:
            raise SourceError(
                f"{INDEX_FILE} of {self.repo} names {len(lost)} files that the repository does not have",
                details=describe_missing(weight_map, lost),
                hint="the repository is incomplete: tell its owner, or take another revision",
            )
        return [files[name] for name in names]

    def _is_cached(self, commit: str, file: _File) -> bool:
        path = self.snapshot(commit) / file.name
        if not path.exists():
            return False
        if file.size and path.stat().st_size != file.size:
            raise damaged(path, f"size promised  {file.size}", f"size found     {path.stat().st_size}")
        return True

    def _check_disk(self, missing: Sequence[_File]) -> None:
        need = 0
        for f in missing:
            blob = self._blob(f)
            if not (blob and blob.exists()):
                part = self._partial(blob) if blob else None
                need += f.size - (part.stat().st_size if part and part.exists() else 0)
        self.storage.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.storage).free
        if need > free:
            raise ResourceError(
                f"the download of {self.repo} takes {format_size(need)} more, and {format_size(free)} are free",
                details=[f"in the cache at {self.storage.parent}"],
                hint="make room (`hf cache ls`, `hf cache rm`), or set HF_HOME to a larger disk",
            )

    # --- the files -------------------------------------------------------------------------------------------------

    def _in_parallel(self, work: Callable[[_File], None], files: Iterable[_File]) -> None:
        """Runs `work` on each file, a few at a time. The first failure, or Ctrl-C, stops the others where they are."""
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="hub") as pool:
            futures = {pool.submit(work, file): file for file in files}
            try:
                for future in as_completed(futures):
                    future.result()
                    self.meter.complete(futures[future].name)
            except BaseException:
                self.meter.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _by_client(self, commit: str, file: _File) -> None:
        """Fetches a file by the client's own means, or links it into the snapshot if its blob is there."""
        from huggingface_hub import hf_hub_download

        if not self._is_cached(commit, file):
            hf_hub_download(self.repo, file.name, revision=commit, tqdm_class=self.meter.bar(file.name))

    def _fetch(self, commit: str, file: _File) -> None:
        """Fetches a shard, going on where an earlier call was interrupted."""
        from huggingface_hub import constants

        from tpuconv.private import are_symlinks_supported

        blob = self._blob(file)
        # Beyond its limit the Hub serves files by Xet only, which the client speaks and which cannot be resumed.
        if blob and not self._is_cached(commit, file) and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
            # Without symlinks the client would copy the blob: the snapshot then holds the file itself.
            linked = are_symlinks_supported(self.storage.parent)
            self._fetch_to(blob if linked else self.snapshot(commit) / file.name, self._partial(blob), commit, file)
        self._by_client(commit, file)

    def _fetch_to(self, target: Path, partial: Path, commit: str, file: _File) -> None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as out:
            while not lock(out.fileno()):  # another process fetches it
                self.meter.check()
                time.sleep(TICK_SECONDS)
            if target.exists():
                if not os.fstat(out.fileno()).st_size:
                    partial.unlink(missing_ok=True)
                return
            at = min(out.seek(0, os.SEEK_END), file.size)
            out.seek(at)
            self.meter.set(file.name, at)
            for chunk in chunks_of(self._url(commit, file), at, file.size, self.meter.stopped):
                out.write(chunk)
                at += len(chunk)
                self.meter.set(file.name, at)
            out.truncate(file.size)
            out.flush()
            partial.replace(target)

    def _lay_out(self, commit: str, file: _File, folder: Path) -> None:
        """Puts a shard's header, then a hole of the weights' size, in `folder`; a link if the shard is in the cache."""
        from tpuconv.sources.source import MAX_HEADER_BYTES

        if self._is_cached(commit, file):
            (folder / file.name).symlink_to(self.snapshot(commit) / file.name)
            return
        url = self._url(commit, file)
        head = bytearray().join(chunks_of(url, 0, min(HEADER_PEEK, file.size), self.meter.stopped))
        end = 8 + int.from_bytes(head[:8], "little")
        if end <= min(file.size, 8 + MAX_HEADER_BYTES):  # else it is no header: the reader of headers says what it is
            for chunk in chunks_of(url, len(head), end, self.meter.stopped):
                self.meter.check()
                head += chunk
            del head[end:]
        with open(folder / file.name, "wb") as out:
            out.write(head)
            out.truncate(file.size)

    def _url(self, commit: str, file: _File) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repo, file.name, revision=commit)

    def _blob(self, file: _File) -> Path | None:
        """Where the client keeps a file of this content, if git does not keep it itself."""
        return self.storage / "blobs" / file.sha256 if file.sha256 else None

    def _partial(self, blob: Path) -> Path:
        return blob.with_name(f"{blob.name}.tpuconv.incomplete")

    # --- without network -------------------------------------------------------------------------------------------

    def _from_cache(self, cause: Exception) -> Resolved:
        """The snapshot in the cache if it is complete."""
        ref = self.storage / "refs" / self.revision
        commit = self.revision if re.fullmatch("[0-9a-f]{40}", self.revision) else ""
        if not commit and ref.is_file():
            commit = ref.read_text().strip()
        snapshot = self.snapshot(commit)
        if not commit or not snapshot.is_dir():
            raise_unreachable(
                self.repo, cause, f"the cache at {self.storage.parent} has nothing of it at revision {self.revision}"
            )
        needed = self._needed(snapshot)
        if missing := [name for name in needed if not (snapshot / name).exists()]:
            have = f"{len(needed) - len(missing)} of the {len(needed)} files needed"
            raise_unreachable(self.repo, cause, f"the cache has {have}, without {_some(missing)}")
        promised = {}
        for path in snapshot.iterdir():
            blob = link_targets(path)[0].name  # of a file shared by repositories, the next target has another hash
            if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", blob):
                promised[path.name] = blob
        return Resolved(snapshot, self.repo, commit, promised)

    def _needed(self, snapshot: Path) -> list[str]:
        from tpuconv.sources.source import INDEX_FILE, SINGLE_FILE

        if (snapshot / INDEX_FILE).exists():
            return ["config.json", INDEX_FILE, *_index_shards(snapshot / INDEX_FILE)]
        if any(snapshot.glob("*-of-*.safetensors")):
            return ["config.json", INDEX_FILE]
        return ["config.json", SINGLE_FILE]


def _index_shards(path: Path) -> list[str]:
    """The shards that an index names."""
    from tpuconv.sources.source import read_weight_map

    return sorted(set(read_weight_map(path).values()))


def _is_wanted(name: str) -> bool:
    """Whether a conversion uses a file beside the weights; all lie in the repository's root."""
    return "/" not in name and (is_companion(name) or name == CARD)


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
