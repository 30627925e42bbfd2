"""From the name of a checkpoint to a folder that holds it: a local folder as it is, a Hub id by download.

Cache, token, endpoint and offline mode are those of `huggingface_hub`. Weights are fetched here instead: the client
throws a partial file away when it is interrupted (2.4.0), and a shard has gigabytes. A partial file lies beside the
client's blobs until it is whole, and the client then links it into the snapshot.
"""

import difflib
import errno
import os
import re
import shlex
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

from tpuconv.errors import HubError, ResourceError, SourceError, TpuconvError, UsageError

COMPANIONS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "tekken.json",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*.jinja",
    "license*",
    "notice*",
    "use_policy*",
    "readme*",
)
"""Files that a conversion uses beside the weights, all in the repository's root; compared in lower case."""

NEVER = ("*.bin", "*.pt", "*.pth", "*.py", "*.onnx", "*.gguf", "*.h5", "*.msgpack", "*.ckpt", "*.pkl")

WORKERS = 8  # files at a time
RETRIES = 5  # failures in a row that bring nothing
BACKOFF_SECONDS = 1.0  # before the first retry, then twice that and so on
HEADER_PEEK = 128 << 10  # holds the header of most shards, so that one request is enough
TICK_SECONDS = 0.1  # between two reports of progress

Progress = Callable[[int, int], None]


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
        UsageError: `src` is neither.
        HubError: the Hub refused, does not know it, or cannot be reached.
        SourceError: the repository holds no safetensors checkpoint, or the cache a damaged file.
        ResourceError: the disk is too small or the cache cannot be written.
    """
    folder = Path(src).expanduser()
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
    with _client_errors(src, revision or "main"):
        return _Hub(src, revision or "main").resolve(weights, progress)


def wrong_hash(path: Path, expected: str, actual: str) -> SourceError:
    """The error for a file whose bytes are not those that the Hub promises, naming what to delete from the cache."""
    return _damaged(path, f"sha256 promised  {expected}", f"sha256 found     {actual}")


def _damaged(path: Path, *details: str) -> SourceError:
    files = _link_targets(path)[-2:]  # the blob and, where repositories share it, the shared file under it
    return SourceError(
        f"{path} is not the file that the Hub promises",
        details=details,
        hint=f"it was damaged on the way or on the disk; delete it and run again, only it is downloaded anew:\n"
        f"     rm {' '.join(shlex.quote(str(f)) for f in files)}",
    )


def _link_targets(path: Path) -> list[Path]:
    """Where a symlink leads, link after link; the path itself if it is none."""
    targets: list[Path] = []
    while path.is_symlink() and len(targets) < 8:
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        targets.append(path)
    return targets or [path]


# --- what the user typed -------------------------------------------------------------------------------------------


def _check_id(src: str, path: Path) -> None:
    """Raises UsageError if `src` cannot be a Hub id."""
    if match := re.match(r"(?:https?://[^/]+/|hf://(?:models/)?)([^/]+/[^/@]+)", src):
        raise UsageError(f"{src} is an address", hint=f"give the id alone: {match[1]}")
    if path.is_file():
        raise UsageError(f"{src} is a file", hint=f"give the folder of the checkpoint: {path.parent}")
    if not src or src.startswith((".", "/", "~")) or src.endswith("/") or src.count("/") > 1 or "\\" in src:
        if path.parent.is_dir():
            raise UsageError(
                f"there is no folder {src!r}", hint=_near_folders(path) or "give a folder or a Hub id: org/name"
            )
        raise UsageError(f"there is no folder {src!r}", hint=f"there is no folder {str(path.parent)!r} either")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(src)
    except HFValidationError:
        raise UsageError(
            f"{src!r} is no folder and no Hub id",
            hint=_near_folders(path) or "an id is `name` or `org/name`, of letters, digits, '-', '_' and '.'",
        ) from None


def _near_folders(path: Path) -> str | None:
    """A hint at folders beside `path` that are called almost so."""
    try:
        folders = [p.name for p in path.parent.iterdir() if p.is_dir()]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, folders, n=3)
    return f"did you mean the folder {' or '.join(str(path.parent / name) for name in near)}?" if near else None


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
        from huggingface_hub.file_download import repo_folder_name

        self.repo = repo
        self.revision = revision
        self.storage = Path(constants.HF_HUB_CACHE).expanduser().resolve() / repo_folder_name(
            repo_id=repo, repo_type="model"
        )
        self.meter = _Meter(None)

    def snapshot(self, commit: str) -> Path:
        return self.storage / "snapshots" / commit

    def resolve(self, weights: bool, progress: Progress | None) -> Resolved:
        try:
            commit, files = self._listing()
        except Exception as error:
            if _is_unreachable(error):
                return self._from_cache(error)
            raise
        from tpuconv.convert.source import INDEX_FILE

        self._remember(commit)
        companions = [f for f in files.values() if _is_companion(f.name)]
        self._check_weights(files)
        if INDEX_FILE in files:
            self._by_client(commit, files[INDEX_FILE])
            companions.append(files[INDEX_FILE])
        shards = self._shards(commit, files)
        snapshot = self.snapshot(commit)
        missing = [f for f in shards if not self._is_cached(commit, f)]
        self.meter = _Meter(progress)
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
        from tpuconv.convert.source import INDEX_FILE, SINGLE_FILE

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
        from tpuconv.convert.source import INDEX_FILE, SINGLE_FILE

        if INDEX_FILE not in files:
            return [files[SINGLE_FILE]]
        names = _index_shards(self.snapshot(commit) / INDEX_FILE)
        if lost := [name for name in names if name not in files]:
            raise SourceError(
                f"{INDEX_FILE} of {self.repo} names {len(lost)} files that the repository does not have",
                details=[_some([repr(name) for name in lost])],
                hint="the repository is incomplete: tell its owner, or take another revision",
            )
        return [files[name] for name in names]

    def _is_cached(self, commit: str, file: _File) -> bool:
        path = self.snapshot(commit) / file.name
        if not path.exists():
            return False
        if file.size and path.stat().st_size != file.size:
            raise _damaged(path, f"size promised  {file.size}", f"size found     {path.stat().st_size}")
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
                f"the download of {self.repo} takes {need / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free",
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
        from huggingface_hub.file_download import are_symlinks_supported

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
            while not _lock(out.fileno()):  # another process fetches it
                self.meter.check()
                time.sleep(TICK_SECONDS)
            if target.exists():
                if not os.fstat(out.fileno()).st_size:
                    partial.unlink(missing_ok=True)
                return
            at = min(out.seek(0, os.SEEK_END), file.size)
            out.seek(at)
            self.meter.set(file.name, at)
            for chunk in _chunks(self._url(commit, file), at, file.size, self.meter.stopped):
                out.write(chunk)
                at += len(chunk)
                self.meter.set(file.name, at)
            out.truncate(file.size)
            out.flush()
            partial.replace(target)

    def _lay_out(self, commit: str, file: _File, folder: Path) -> None:
        """Puts a shard's header, then a hole of the weights' size, in `folder`; a link if the shard is in the cache."""
        from tpuconv.convert.source import MAX_HEADER_BYTES

        if self._is_cached(commit, file):
            (folder / file.name).symlink_to(self.snapshot(commit) / file.name)
            return
        url = self._url(commit, file)
        head = bytearray().join(_chunks(url, 0, min(HEADER_PEEK, file.size), self.meter.stopped))
        end = 8 + int.from_bytes(head[:8], "little")
        if end <= min(file.size, 8 + MAX_HEADER_BYTES):  # else it is no header: the reader of headers says what it is
            for chunk in _chunks(url, len(head), end, self.meter.stopped):
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
            _raise_unreachable(
                self.repo, cause, f"the cache at {self.storage.parent} has nothing of it at revision {self.revision}"
            )
        needed = self._needed(snapshot)
        if missing := [name for name in needed if not (snapshot / name).exists()]:
            have = f"{len(needed) - len(missing)} of the {len(needed)} files needed"
            _raise_unreachable(self.repo, cause, f"the cache has {have}, without {_some(missing)}")
        promised = {}
        for path in snapshot.iterdir():
            blob = _link_targets(path)[0].name  # of a file shared by repositories, the next target has another hash
            if path.is_symlink() and re.fullmatch("[0-9a-f]{64}", blob):
                promised[path.name] = blob
        return Resolved(snapshot, self.repo, commit, promised)

    def _needed(self, snapshot: Path) -> list[str]:
        from tpuconv.convert.source import INDEX_FILE, SINGLE_FILE

        if (snapshot / INDEX_FILE).exists():
            return ["config.json", INDEX_FILE, *_index_shards(snapshot / INDEX_FILE)]
        if any(snapshot.glob("*-of-*.safetensors")):
            return ["config.json", INDEX_FILE]
        return ["config.json", SINGLE_FILE]


def _index_shards(path: Path) -> list[str]:
    """The shards that an index names, before the source's reader judges the rest of it."""
    from tpuconv.convert.source import read_json

    weight_map = read_json(path, SourceError).get("weight_map")
    names = {str(name) for name in weight_map.values()} if isinstance(weight_map, dict) else set()
    unsafe = [repr(n) for n in names if not re.fullmatch(r"[^/\\\0]+\.safetensors", n)]
    if not names or unsafe:
        raise SourceError(
            f"{path} names files that are no safetensors file of its folder" if unsafe else f"{path} names no shards",
            details=[_some(sorted(unsafe))] if unsafe else (),
            hint="do not trust this checkpoint",
        )
    return sorted(names)


def _is_companion(name: str) -> bool:
    lower = name.lower()
    return (
        "/" not in name
        and any(fnmatchcase(lower, pattern) for pattern in COMPANIONS)
        and not any(fnmatchcase(lower, pattern) for pattern in NEVER)
    )


def _some(names: Sequence[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# --- bytes ---------------------------------------------------------------------------------------------------------


def _chunks(url: str, at: int, end: int, stopped: threading.Event) -> Iterator[bytes]:
    """The bytes of a file from `at` to `end`. What breaks off is taken up where it broke."""
    from huggingface_hub import constants, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers, http_stream_backoff  # type: ignore[attr-defined]

    failures = 0
    while at < end:
        headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={at}-{end - 1}"}
        try:
            with http_stream_backoff(
                "GET",
                url,
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                retry_on_exceptions=(),
                retry_on_status_codes=(408, 429),  # those say when to come back, and the client heeds it
            ) as response:
                hf_raise_for_status(response)
                skip = at if response.status_code == 200 else 0  # a proxy may ignore the range and send it all
                for chunk in response.iter_bytes():
                    chunk, skip = chunk[skip:], max(skip - len(chunk), 0)
                    if chunk := chunk[: end - at]:
                        at += len(chunk)
                        failures = 0
                        yield chunk
                    if at == end:
                        return
            raise TimeoutError(f"{url} ended {end - at} bytes early")
        except Exception as error:
            if not _is_unreachable(error) or _is_offline(error):
                raise
            failures += 1
            if failures > RETRIES:
                raise
            if stopped.wait(BACKOFF_SECONDS * 2 ** (failures - 1)):
                raise _Stopped from None


def _lock(fd: int) -> bool:
    """Takes the lock on an open file if nobody has it. Where the file system knows no locks, everybody gets it: two
    writers then write the same bytes to the same places."""
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
    return True


class _Stopped(Exception):
    """Another file failed, or the user interrupted: this one stops too."""


class _Meter:
    """Bytes there of bytes in all, over the files of a download, reported a few times a second."""

    def __init__(self, progress: Progress | None):
        self.stopped = threading.Event()
        self._progress = progress
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._next = 0.0

    def expect(self, name: str, size: int) -> None:
        self._sizes[name] = size

    def set(self, name: str, done: int) -> None:
        self.check()
        with self._lock:
            self._done[name] = min(done, self._sizes.get(name, 0))
            if self._progress and time.monotonic() >= self._next:
                self._progress(sum(self._done.values()), sum(self._sizes.values()))
                self._next = time.monotonic() + TICK_SECONDS

    def add(self, name: str, n: float) -> None:
        self.set(name, self._done.get(name, 0) + int(n))

    def complete(self, name: str) -> None:
        self.set(name, self._sizes.get(name, 0))

    def finish(self) -> None:
        if self._progress:
            self._progress(sum(self._sizes.values()), sum(self._sizes.values()))

    def check(self) -> None:
        if self.stopped.is_set():
            raise _Stopped

    def bar(self, name: str) -> Any:
        """What the client takes for a progress bar; it draws nothing and reports to this meter."""
        meter = self

        class Bar:
            def __init__(self, *_: object, initial: int = 0, **__: object):
                meter.set(name, initial)

            def __enter__(self) -> "Bar":
                return self

            def __exit__(self, *_: object) -> None: ...

            def update(self, n: float | None = 1) -> None:
                meter.add(name, n or 0)

            def update_transfer(self, n: float | None = 1) -> None:
                meter.check()

            def set_postfix_str(self, *_: object, **__: object) -> None: ...

            set_transfer_postfix_str = set_postfix_str

            def close(self) -> None: ...

        return Bar


# --- errors --------------------------------------------------------------------------------------------------------


@contextmanager
def _client_errors(repo: str, revision: str) -> Iterator[None]:
    """Turns whatever the client raises into an error of ours."""
    try:
        yield
    except TpuconvError:
        raise
    except Exception as error:
        raise _translate(error, repo, revision) from error


def _translate(error: BaseException, repo: str, revision: str) -> TpuconvError:
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # the client reports any failure of a request as a file that is not in its cache
    if _is_unreachable(error):
        return _unreachable(repo, error)
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    page = f"{constants.ENDPOINT}/{repo}"
    login = "`hf auth login`, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        then = "run again" if get_token() else f"log in with {login}"
        return HubError(f"{repo} is gated: its owner has not granted you access", hint=f"ask at {page}, then {then}")
    if isinstance(error, errors.DisabledRepoError):
        return HubError(f"{repo} has been disabled on the Hub", hint=f"see {page}")
    if isinstance(error, errors.RevisionNotFoundError):
        near = difflib.get_close_matches(revision, _revisions(repo), n=3, cutoff=0.5)
        return HubError(
            f"{repo} has no revision {revision}",
            hint=f"did you mean {' or '.join(near)}?" if near else f"its branches and tags are at {page}/tree/main",
        )
    if isinstance(error, errors.RemoteEntryNotFoundError):
        name = str(error.response.url.path).rpartition("/")[2]
        return HubError(f"{repo} at revision {revision} lists {name} but does not serve it", hint="try again later")
    near_folder = _near_folders(Path(repo))
    if status == 401:
        if get_token():
            return HubError(f"the Hub does not accept your token for {repo}", hint=f"renew it with {login}")
        return HubError(
            f"{repo} needs a token, or does not exist: the Hub does not tell which",
            hint=near_folder or f"check the name; if it is right, log in with {login}",
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return HubError(
            f"{repo} does not exist on the Hub, or your token may not see it",
            hint=near_folder or f"check the name at {constants.ENDPOINT}/models?search={repo.rpartition('/')[2]}",
        )
    if status == 403:
        return HubError(
            f"the Hub denies access to {repo}",
            hint=f"your token needs the permission to read this repository: see {page}, then {login}",
        )
    if status == 429:
        return HubError(
            "the Hub limits the rate of your requests",
            hint=f"wait some minutes and run again, it goes on where it was; log in with {login} for a higher limit",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(
            f"the disk is full: {repo} does not fit in the cache at {constants.HF_HUB_CACHE}",
            hint="make room (`hf cache ls`, `hf cache rm`), or set HF_HOME to a larger disk; a rerun goes on",
        )
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return ResourceError(
            f"the cache at {constants.HF_HUB_CACHE} cannot be used: {error.strerror}: {error.filename}",
            hint="set HF_HOME to a folder where you may write",
        )
    return HubError(
        f"the download of {repo} failed",
        details=[f"{type(error).__name__}: {line}" for line in str(error).splitlines()[:1]],
        hint=f"check that {constants.ENDPOINT} is a Hub (HF_ENDPOINT); what is downloaded stays and a rerun goes on",
    )


def _is_unreachable(error: BaseException) -> bool:
    """Whether nobody answered, or the server is down."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 408
    # The client's HTTP library is httpx or httpx2, by its version; both call the class so.
    http = sys.modules[HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
    return isinstance(error, http.TransportError | TimeoutError) or _is_offline(error)


def _is_offline(error: BaseException) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled)


def _unreachable(repo: str, cause: BaseException, *details: str) -> HubError:
    from huggingface_hub import constants

    if _is_offline(cause):
        return HubError(
            f"{repo} is not complete in the cache, and offline mode is on",
            details=details,
            hint="unset HF_HUB_OFFLINE (and TRANSFORMERS_OFFLINE) and run again, or give a folder",
        )
    reason = (str(cause) or type(cause).__name__).splitlines()[0]
    return HubError(
        f"the Hub at {constants.ENDPOINT} cannot be reached",
        details=[reason, *details],
        hint="check the network (and HF_ENDPOINT, proxies); what is downloaded stays and a rerun goes on where it was",
    )


def _raise_unreachable(repo: str, cause: Exception, detail: str) -> NoReturn:
    raise _unreachable(repo, cause, detail) from cause


def _revisions(repo: str) -> list[str]:
    from huggingface_hub import HfApi

    with suppress(Exception):  # only for a hint
        refs = HfApi().list_repo_refs(repo)
        return [ref.name for ref in (*refs.branches, *refs.tags)]
    return []
