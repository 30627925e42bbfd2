"""Errors of object stores as errors of tpuconv, with what the server said and what to do."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from tpuconv.credentials import CREDENTIAL_HINTS, RIGHTS
from tpuconv.errors import AccessRefused, BucketError, UsageError
from tpuconv.location import SCHEMES, BucketPath

_DEBUG = "\n\nDebug source:"
"""The end of the text of an error of obstore, before its structure in Rust."""
_URL = re.compile(r"(https?://[^\s?]*)(\?\S*)?")
_SAID = (
    re.compile(r"<Code>([^<]{1,99})</Code>.*?<Message>([^<]{1,400})</Message>", re.DOTALL),
    re.compile(r'"()message": *"([^"]{1,400})"'),
)
"""The code and the message in the body of an answer: XML of all three stores, JSON of Google."""
_REFUSED = re.compile(r"status code: 40[13]\b")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound|list request.* 404 ", re.DOTALL)
_OTHER_REGION = re.compile("AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocation|redirect without LOCATION")
_EXPIRED = re.compile("ExpiredToken|TokenRefreshRequired|has expired")
_WRONG_CLOCK = re.compile("RequestTimeTooSkewed")
_NO_CREDENTIALS = re.compile("credential|metadata server|token|SecretAccessKey|service account", re.IGNORECASE)
_METADATA_SERVER = "//169.254.169.254/"
"""The address at which a machine of a cloud finds its credentials. It is asked last."""
_PROVIDER = re.compile(r"External \w+ credential provider: (.*)")
"""The error of boto3 or google-auth, of which obstore asked for credentials."""
_RUN_AGAIN = "run the same command: it resumes where it stopped"


class ConditionLost(Exception):
    """The object was written by another process since: the condition of a write does not hold."""


@contextmanager
def translated(path: BucketPath, done: str = "read") -> Iterator[None]:
    """Turns errors of obstore within the `with` into ours; a missing object into a FileNotFoundError with its name.

    Args:
        path: the object or folder.
        done: what was done with it: "read", "listed", "written" or "deleted".
    """
    try:
        from obstore import exceptions
    except ImportError:
        yield  # `buckets` says that it is missing
        return
    try:
        yield
    except FileNotFoundError as e:
        if e.errno is not None:  # of a local disk, within an upload
            raise
        if done in ("written", "deleted") or _NO_BUCKET.search(str(e)):
            raise _no_bucket(path, done) from None
        raise FileNotFoundError(errno.ENOENT, "is missing", str(path)) from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise ConditionLost(str(path)) from None
    except exceptions.InvalidPathError as e:
        raise UsageError(
            f"{path} cannot be used: {_reason(e)}", hint="rename or delete that object, or give another folder"
        ) from None
    except (exceptions.UnknownConfigurationKeyError, exceptions.NotSupportedError) as e:
        raise UsageError(
            f"{path} cannot be used: {_reason(e)}",
            hint=f"check the environment variables of {SCHEMES[path.scheme]}",
        ) from None
    except (exceptions.BaseError, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:  # of a local disk, within an upload
            raise
        raise _error(path, done, e) from None


def _error(path: BucketPath, done: str, error: Exception) -> BucketError:
    """Returns the error of a request that failed."""
    store, hint, reason = SCHEMES[path.scheme], CREDENTIAL_HINTS[path.scheme], _reason(error)
    text = _URL.sub("", str(error).partition(_DEBUG)[0])  # names of objects are no reasons: tokenizer.json
    if _NO_BUCKET.search(text):
        return _no_bucket(path, done)
    if _OTHER_REGION.search(text):
        return BucketError(
            f"{path} cannot be {done}: its bucket is in another region",
            details=[reason],
            hint="set AWS_REGION to the region of the bucket",
        )
    if _EXPIRED.search(text):
        return BucketError(
            f"{path} cannot be {done}: the credentials for {store} have expired",
            details=[reason],
            hint=f"log in again, and {_RUN_AGAIN}",
        )
    if _WRONG_CLOCK.search(text):
        return BucketError(
            f"{path} cannot be {done}: {store} says that the clock of this machine is wrong",
            details=[reason],
            hint=f"set the clock, and {_RUN_AGAIN}",
        )
    if not _PROVIDER.search(text) and (isinstance(error, PermissionError) or _is_refused(error)):
        return AccessRefused(
            f"{path} cannot be {done}: {store} refuses access",
            details=[reason] if _said(text) else [],
            hint=f"ask for the right ({RIGHTS[path.scheme][done]}), or {hint}",
        )
    if _METADATA_SERVER in str(error):
        return BucketError(
            f"{path} cannot be {done}: no credentials for {store} were found, in no variable and on no metadata server",
            hint=hint,
        )
    if _NO_CREDENTIALS.search(_URL.sub("", reason)):
        return BucketError(f"{path} cannot be {done}: no credentials for {store}: {reason}", hint=hint)
    return BucketError(
        f"{path} cannot be {done}: {reason}",
        hint=f"check the network, the credentials and the region, and {_RUN_AGAIN}",
    )


def _no_bucket(path: BucketPath, done: str) -> BucketError:
    return BucketError(
        f"{path} cannot be {done}: there is no bucket {path.root}", hint="check its name and the account, or create it"
    )


def _is_refused(error: Exception) -> bool:
    """Returns True if the server refused. obstore has a class for that, but not of lists."""
    from obstore import exceptions

    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return True
    text = str(error).partition(_DEBUG)[0]
    return "performing list request" in text and _REFUSED.search(text) is not None


def _said(text: str) -> re.Match[str] | None:
    """Returns the code and the message of the server."""
    return next((found for pattern in _SAID if (found := pattern.search(text))), None)


def _reason(error: BaseException) -> str:
    """Returns what the server said, or else the first line of an error, without the queries of URLs, which
    contain signatures in Azure."""
    text, _, debug = str(error).strip().partition(_DEBUG)
    if found := _PROVIDER.search(text):
        return f"{found[1]} (credential provider)"
    if found := _said(text):
        return ": ".join(part.strip() for part in found.groups() if part.strip())
    line = _URL.sub(r"\1", text.partition("\n")[0]).strip().removesuffix(":")
    if "kind: Timeout" in debug:
        return f"{line} (no answer in time)"
    return f"{line} (no connection)" if "kind: Connect" in debug else line
