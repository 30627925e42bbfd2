"""From the name of a checkpoint to a folder that holds it: a local folder as it is, a Hub id by download."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from tpuconv.errors import UsageError
from tpuconv.location import BucketPath, Location, near_folders, to_location
from tpuconv.sources.config import read_config
from tpuconv.sources.download import DownloadProgress
from tpuconv.sources.files import CONFIG_FILE
from tpuconv.sources.hub_errors import client_errors
from tpuconv.sources.repository import Repository, Resolved
from tpuconv.storage.places import check_finished
from tpuconv.text import plain


def resolve(
    src: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    streams: bool = False,
    progress: DownloadProgress | None = None,
) -> Resolved:
    """Returns the folder of a checkpoint, downloaded first if `src` is a Hub id.

    Args:
        src: a folder, the URL of one in a bucket, or a Hub id as `name` or `org/name`. An existing folder has
            precedence.
        revision: a branch, tag or commit of the Hub repository.
        weights: if false, only the headers of shards that are not in the cache are fetched. The folder then is a
            temporary one, whose shards have their full size but hold no weights.
        streams: with `weights` false, whether weights will be read from `remote`: what cannot be, is downloaded.
        progress: called with the bytes present and the total, from any thread, one call at a time.

    Raises:
        UsageError: `src` is neither, or a path that the system refuses.
        HubError: the Hub refuses, does not know the id, or cannot be reached.
        SourceError: the repository holds no safetensors checkpoint, or the cache holds a damaged file.
        ResourceError: the disk is too small, or the cache cannot be written.
    """
    folder = source_location(src)
    if isinstance(folder, BucketPath):
        if revision is not None:
            raise UsageError(f"`revision={revision!r}` needs a Hub id, and {src} is in a bucket", hint="leave it out")
        return Resolved(folder)
    if src and folder.is_dir():
        if revision is not None:
            raise UsageError(
                f"`revision={revision!r}` needs a Hub id, and {src} is a folder",
                hint="leave it out, or run where no folder has this name",
            )
        return Resolved(folder)
    _check_id(src, folder)
    if revision is not None and (".." in revision or not re.fullmatch(r"[^\s/\\-][^\s\\]*", revision)):
        raise UsageError(f"{revision!r} is not a branch, tag or commit")
    with client_errors(src, revision or "main"):
        return Repository(src, revision or "main").resolve(weights, progress, streams=streams)


def fetch_checkpoint(src: str) -> Path:
    """Returns the folder of a checkpoint of tpuconv on the Hub, downloaded to the Hub's cache. Interrupted, the same
    call continues.

    Raises:
        HubError: the Hub refuses, does not know the id, or cannot be reached.
    """
    with client_errors(src, "main"):
        return Repository(src, "main").fetch()


def fetch_config(src: str) -> dict[str, Any]:
    """Returns the config.json of a folder or a Hub id, or the file `src` itself; see `read_config`. Nothing else is
    read.

    Raises:
        UsageError: `src` is none of these, or a path that the system refuses.
        ConfigError: config.json is missing, or holds no JSON object.
        HubError: the Hub refuses, does not know the id, or cannot be reached.
    """
    path = source_location(src)
    if isinstance(path, BucketPath):
        return read_config(path if path.suffix == ".json" else path / CONFIG_FILE)
    if src and (path.is_dir() or path.suffix == ".json"):
        return read_config(path / CONFIG_FILE if path.is_dir() else path)
    _check_id(src, path)
    with client_errors(src, "main"):
        return read_config(Repository(src, "main").config())


def source_location(src: str) -> Location:
    """Returns a source as a path, which need not exist, or as the URL of a bucket.

    Raises:
        UsageError: it is the address of a page of the Hub; the system refuses to look there (a name too long, a NUL, a
            folder that may not be searched), or does not know the user of `~user`.
    """
    if match := re.match(r"(?:https?://[^/]+/|hf://(?:models/)?)([^/]+/[^/@]+)", src):
        raise UsageError(f"{src} is an address", hint=f"give the id alone: {match[1]}")
    try:
        location = to_location(src)
        if isinstance(location, BucketPath):
            return location
        path = location.expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
        if path.name:
            check_finished(path)
    except (OSError, ValueError, RuntimeError) as e:
        shown = repr(src) if len(src) < 200 else f"{src[:60]!r}..., of {len(src)} characters,"
        reason = e.strerror if isinstance(e, OSError) else str(e)
        raise UsageError(f"{shown} cannot be read: {reason}", hint="give a folder or a Hub id: org/name") from e
    return path


def _check_id(src: str, path: Path) -> None:
    """Raises UsageError if `src` cannot be a Hub id."""
    if path.is_file():
        raise UsageError(f"{src} is a file", hint=f"give the folder of the checkpoint: {plain(str(path.parent))}")
    if not src or src.startswith((".", "/", "~")) or src.endswith("/") or src.count("/") > 1 or "\\" in src:
        if path.parent.is_dir():
            raise UsageError(
                f"there is no folder {src!r}", hint=near_folders(path) or "give a folder or a Hub id: org/name"
            )
        or_id = f"; {alone}" if (alone := _id_alone(src)) else ""
        raise UsageError(f"there is no folder {src!r}", hint=f"there is no folder {str(path.parent)!r} either{or_id}")
    from huggingface_hub.errors import HFValidationError

    from tpuconv.private import validate_repo_id

    try:
        validate_repo_id(src)
    except HFValidationError:
        raise UsageError(
            f"{src!r} is neither a folder nor a Hub id",
            hint=near_folders(path)
            or _id_alone(src)
            or "an id is `name` or `org/name`, of letters, digits, '-', '_' and '.'",
        ) from None


def _id_alone(src: str) -> str:
    """Returns a hint for a Hub id with a path or a revision behind it; empty if `src` is none."""
    found = re.fullmatch(r"([\w-][\w.-]*/[\w.-]+)(?:/[^@:]*|[@:](.+))", src)
    if not found:
        return ""
    return f"if it is on the Hub, give the id alone: {found[1]}" + (
        f", and `revision={found[2]!r}`" if found[2] else ""
    )
