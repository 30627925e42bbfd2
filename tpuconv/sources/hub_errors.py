"""Errors of the Hub's client as errors of ours, which say what to do."""

import difflib
import errno
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from tpuconv.errors import HubError, ResourceError, TpuconvError, no_descriptors
from tpuconv.location import near_folders


class Stopped(Exception):
    """Another file failed, or the user interrupted the download."""


@contextmanager
def client_errors(repo: str, revision: str, folder: Path | None = None, *, to_write: bool = False) -> Iterator[None]:
    """Turns all errors of the client within the `with` into errors of ours: HubError or ResourceError. They say what
    the client said. Its error is not their cause: Python would show hundreds of lines of HTTP libraries before.

    Args:
        repo, revision: for messages.
        folder: where the client writes; its cache if there is none.
        to_write: whether the client uploads.
    """
    try:
        yield
    except (TpuconvError, Stopped):
        raise
    except Exception as error:
        raise _translate(error, repo, revision, folder, to_write) from None


def _translate(error: BaseException, repo: str, revision: str, folder: Path | None, to_write: bool) -> TpuconvError:
    from huggingface_hub import constants, errors, get_token

    error = cause_of(error)
    if to_write and isinstance(error, RuntimeError) and error.__cause__:
        error = error.__cause__  # of one file
    if is_unreachable(error):
        return _unreachable(repo, error, to_write=to_write)
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
    if name := _lost_file(error):
        return HubError(f"{repo} at revision {revision} lists {name} but does not serve it", hint="try again later")
    near_folder = None if to_write else near_folders(Path(repo))
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
        permission = f"the permission to {'write to' if to_write else 'read'} this repository"
        return HubError(
            f"the Hub denies access to {repo}",
            hint=f"your token needs {permission}: see {page}, then {login}",
        )
    if status == 429:
        return HubError(
            "the Hub limits the rate of your requests",
            hint=f"wait some minutes and run again to resume; log in with {login} for a higher limit",
        )
    if isinstance(error, OSError) and folder is not None and error.errno is not None:
        return _write_error(folder, error)
    if isinstance(error, OSError) and (found := _system_error(error, repo, to_write)):
        return found
    return HubError(
        f"the {_direction(to_write)} of {repo} failed",
        details=[f"{type(error).__name__}: {line}" for line in str(error).splitlines()[:1]],
        hint=f"check that {constants.ENDPOINT} is a Hub (HF_ENDPOINT); run again to resume the {_direction(to_write)}",
    )


def _lost_file(error: BaseException) -> str:
    """Returns the name of the file that an answer of 404 is about; "" for other errors. The host that has the large
    files does not say, as the Hub does, that it is the file that is missing."""
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if isinstance(error, RepositoryNotFoundError) or not isinstance(error, HfHubHTTPError):
        return ""
    answers = [*error.response.history, error.response]  # the first was asked under the file's name
    asked = str(answers[0].url.path)
    return asked.rpartition("/")[2] if error.response.status_code == 404 and "/resolve/" in asked else ""


def _write_error(folder: Path, error: OSError) -> TpuconvError:
    from tpuconv.storage.disk import write_error  # with it numpy comes

    return write_error(folder, error)


def _system_error(error: OSError, repo: str, to_write: bool) -> TpuconvError | None:
    """Returns the error for a call that the system refused; None for others."""
    from huggingface_hub import constants

    if exhausted := no_descriptors(f"a file or connection of {repo}", error):
        return exhausted
    if to_write:
        return ResourceError(f"the upload to {repo} failed: {error.strerror or error}", hint="run again to resume")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(
            f"the disk is full: {repo} does not fit in the cache at {constants.HF_HUB_CACHE}",
            hint="make room (`hf cache ls`, `hf cache rm`), or set HF_HOME to a larger disk; run again to resume",
        )
    if error.errno == errno.EFBIG:
        return ResourceError(
            f"a file of {repo} is larger than the file size that is allowed in the cache at {constants.HF_HUB_CACHE}",
            hint="raise the limit of this process (`ulimit -f unlimited`), or set HF_HOME to a file system that takes "
            "larger files; run again to resume",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return ResourceError(
            f"the cache at {constants.HF_HUB_CACHE} cannot be used: {error.strerror}: {error.filename}",
            hint="set HF_HOME to a folder where you may write",
        )
    return None


def _direction(to_write: bool) -> str:
    return "upload" if to_write else "download"


def cause_of(error: BaseException) -> BaseException:
    """Returns the failure of a request that the client reports as a file that is not in its cache; else the error."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error


def is_unreachable(error: BaseException) -> bool:
    """Returns True if the server did not answer, or is down."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 408
    # The client's HTTP library is httpx or httpx2, by its version; both call the class so.
    http = sys.modules[HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]
    return isinstance(error, http.TransportError | TimeoutError) or is_offline(error)


def is_offline(error: BaseException) -> bool:
    """Returns True if the client is in offline mode (HF_HUB_OFFLINE)."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled)


def _unreachable(repo: str, cause: BaseException, *details: str, to_write: bool = False) -> HubError:
    from huggingface_hub import constants

    if is_offline(cause) and to_write:
        return HubError("offline mode is on", hint="unset HF_HUB_OFFLINE and run again")
    if is_offline(cause):
        return HubError(
            f"{repo} is not complete in the cache, and offline mode is on",
            details=details,
            hint="unset HF_HUB_OFFLINE (and TRANSFORMERS_OFFLINE) and run again, or give a folder",
        )
    reason = re.sub(r"\?[^\s']*", "", (str(cause) or type(cause).__name__).splitlines()[0])  # signatures of addresses
    return HubError(
        f"the Hub at {constants.ENDPOINT} cannot be reached",
        details=[reason, *details, *([] if to_write else _no_folder(repo))],
        hint=f"check the network (and HF_ENDPOINT, proxies); run again to resume the {_direction(to_write)}",
    )


def _no_folder(repo: str) -> list[str]:
    """Returns a hint that the id is not a local folder either, with the names of similar folders: it may be
    mistyped."""
    near = near_folders(Path(repo))
    return [f"there is no folder {repo} here either" + (f": {near}" if near else "")]


def raise_unreachable(repo: str, cause: Exception, detail: str) -> NoReturn:
    """Raises the HubError for a Hub that cannot be reached, with what the cache lacks as `detail`."""
    raise _unreachable(repo, cause, detail) from None


def _revisions(repo: str) -> list[str]:
    from huggingface_hub import HfApi

    with suppress(Exception):  # only for a hint
        refs = HfApi().list_repo_refs(repo)
        return [ref.name for ref in (*refs.branches, *refs.tags)]
    return []
