"""Objects in buckets, by obstore (extra `cloud`). No other module makes requests to an object store.

Objects appear complete or not at all, and are durable when a write returns. Functions that write raise BucketError if
the store refuses or cannot be reached, after retries; a missing object is a FileNotFoundError, as on a disk.
"""

import errno
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

from tpuconv.errors import BucketError, UsageError
from tpuconv.location import SCHEMES, BucketPath

Version = Mapping[str, str]
"""What tells two contents of an object apart: `e_tag`, and `version` where the store has one."""
ABSENT_OBJECT: Version = {}
"""The condition of a write that there is no object yet."""

REQUESTS = 16
"""Requests for small objects at a time."""
PART_BYTES_OF_UPLOADS = 32 << 20
"""The parts of an object that is written from start to end: 10,000 of them, the most that stores take, are 320 GB."""

PARTS_AT_A_TIME = 4
"""Each is in memory until it is written."""

CLIENT = {"timeout": "300s", "connect_timeout": "10s"}
BUCKET_RETRIES: dict[str, Any] = {"max_retries": 8, "retry_timeout": timedelta(minutes=3)}

ENDPOINTS = {"gs": ("GOOGLE_BASE_URL",), "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "az": ("AZURE_ENDPOINT",)}
"""Variables with the address of another server than the cloud's own."""
CREDENTIAL_HINTS = {
    "gs": "log in with `gcloud auth application-default login`, or name a key file in GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or install boto3 for profiles and SSO",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another credential of Azure",
}


class ConditionLost(Exception):
    """The object was written by another process since: the condition of a write does not hold."""


@dataclass(frozen=True)
class ObjectFacts:
    """An object: its size in bytes, its version, and when the server says it was written."""

    size: int
    version: Version
    modified: datetime


class Bucket:
    """One bucket: every request of tpuconv that changes it goes through `put`, `upload`, `copy` or `delete`.

    Args:
        root: its URL, for messages.
        store: of obstore.
    """

    def __init__(self, root: str, store: Any):
        self.root, self.store = root, store

    def put(self, key: str, data: Any, only_if: Version | None = None) -> Version:
        """Writes an object by one request; see `put_object`."""
        import obstore

        mode: Any = "overwrite" if only_if is None else dict(only_if) or "create"
        # A PUT of its own, not in parts: the condition holds for it, and nothing is left if it fails.
        return _version(obstore.put(self.store, key, data, mode=mode, use_multipart=False))

    @contextmanager
    def upload(self, key: str) -> Iterator[Callable[[Any], object]]:
        """A function that appends bytes to a new object, which appears when the `with` ends without an error."""
        import obstore

        file = obstore.open_writer(self.store, key, buffer_size=PART_BYTES_OF_UPLOADS, max_concurrency=PARTS_AT_A_TIME)
        yield file.write
        file.close()

    def copy(self, key: str, target: str) -> None:
        """Copies an object within the bucket; its bytes do not come through this machine."""
        import obstore

        obstore.copy(self.store, key, target)

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, in any order."""
        import obstore

        obstore.delete(self.store, list(keys))


OPEN: dict[str, Bucket] = {}
"""The buckets that were opened, by URL."""
_opening = threading.Lock()


def bucket_of(path: BucketPath) -> Bucket:
    """The bucket of a path.

    Raises:
        UsageError: obstore is not installed.
        BucketError: the settings of the environment are not valid.
    """
    with _opening:
        if path.root not in OPEN:
            with _translated(path):
                OPEN[path.root] = Bucket(path.root, _connect(path))
        return OPEN[path.root]


def _connect(path: BucketPath) -> Any:
    if find_spec("obstore") is None:
        raise UsageError(
            f"{path} is in {SCHEMES[path.scheme]}, and obstore is not installed",
            hint="pip install 'tpuconv[cloud]'",
        )
    from obstore.store import from_url

    is_plain = (endpoint(path.scheme) or "").startswith("http://")
    options: dict[str, Any] = {"client_options": CLIENT | ({"allow_http": True} if is_plain else {})}
    if path.scheme == "s3" and not is_plain:
        options["unsigned_payload"] = True  # TLS protects the bytes, and hashing them takes longer than sending them
    _, provider = credentials(path.scheme)
    if provider is not None:
        options["credential_provider"] = provider()
    return from_url(path.root, retry_config=BUCKET_RETRIES, **options)  # type: ignore[call-overload]


def endpoint(scheme: str) -> str | None:
    """The address of another server than the cloud's own, if the environment names one."""
    return next((os.environ[name] for name in ENDPOINTS[scheme] if name in os.environ), None)


def region() -> str | None:
    """Amazon's region, if the environment names one."""
    return next((os.environ[name] for name in ("AWS_REGION", "AWS_DEFAULT_REGION") if name in os.environ), None)


def credentials(scheme: str) -> tuple[str, Callable[[], Any] | None]:
    """Whose credentials are used: a name for people, and what makes obstore's provider; None for obstore's own ways."""
    if names := [name for name in CREDENTIAL_VARIABLES[scheme] if name in os.environ]:
        return f"the environment ({', '.join(names)})", None
    found = _google_credentials() if scheme == "gs" else _boto3_credentials() if scheme == "s3" else None
    return found or ("those of this machine, if it has any", None)


def _google_credentials() -> tuple[str, Callable[[], Any]] | None:
    """What google-auth finds, where it is installed: a login of gcloud, a workload identity, a metadata server."""
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError:
        return None
    try:
        found, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    except DefaultCredentialsError:
        return None
    return f"google-auth ({type(found).__module__})", lambda: GoogleCredentialProvider(credentials=found)


def _boto3_credentials() -> tuple[str, Callable[[], Any]] | None:
    """What boto3 finds, where it is installed: a profile, SSO, a role."""
    try:
        import boto3  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = boto3.Session()
    keys = session.get_credentials()
    return None if keys is None else (f"boto3 ({keys.method})", lambda: Boto3CredentialProvider(session))


CREDENTIAL_VARIABLES = {
    "gs": (
        *("GOOGLE_BEARER_TOKEN", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        *("GOOGLE_SKIP_SIGNATURE",),
    ),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    "az": (
        *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE"),
        *("AZURE_SKIP_SIGNATURE",),
    ),
}
"""Variables by which obstore itself finds credentials. They come before those that other libraries find."""


# --- reading -------------------------------------------------------------------------------------------------------


def read(path: BucketPath, start: int = 0, stop: int | None = None) -> memoryview:
    """The bytes [start, stop) of an object, all of it by default.

    Raises:
        FileNotFoundError: there is no such object.
    """
    store = bucket_of(path).store
    import obstore

    with _translated(path):
        if stop is None:
            return memoryview(obstore.get(store, path.key).bytes())
        return memoryview(obstore.get_range(store, path.key, start=start, end=stop))


def read_ranges(path: BucketPath, starts: Sequence[int], length: int) -> list[memoryview]:
    """Some bytes of an object from each of `starts` on, asked for together."""
    store = bucket_of(path).store
    import obstore

    with _translated(path):
        found = obstore.get_ranges(store, path.key, starts=starts, lengths=[length] * len(starts))
        return [memoryview(data) for data in found]


def stream(
    path: BucketPath, block_bytes: int, span: tuple[int, int] | None = None, version: Version = ABSENT_OBJECT
) -> Iterator[memoryview]:
    """Yields the bytes of an object in blocks of at least this size.

    Args:
        path: the object.
        block_bytes: of a block; only the last one may be smaller.
        span: the bytes [start, stop) alone.
        version: that the object must have, if the store has ETags.

    Raises:
        FileNotFoundError: there is no such object.
        ConditionLost: it has another version.
    """
    store = bucket_of(path).store
    import obstore

    options: Any = {"range": span} if span else {}
    if "e_tag" in version:
        options["if_match"] = version["e_tag"]
    with _translated(path):
        blocks = iter(obstore.get(store, path.key, options=options).stream(min_chunk_size=block_bytes))
    while True:
        with _translated(path):
            block = next(blocks, None)
        if block is None:
            return
        yield memoryview(block)


def facts(path: BucketPath) -> ObjectFacts | None:
    """The facts of an object; None if there is none."""
    if not path.key:
        return None
    store = bucket_of(path).store
    import obstore

    try:
        with _translated(path):
            found = obstore.head(store, path.key)
    except FileNotFoundError:
        return None
    return _facts(found)


def listing(folder: BucketPath) -> dict[str, int]:
    """The size of every object in a folder and its folders, by its name from there."""
    return {name: found.size for name, found in listing_facts(folder).items()}


def listing_facts(folder: BucketPath) -> dict[str, ObjectFacts]:
    """The facts of every object in a folder and its folders, by its name from there."""
    store, cut = bucket_of(folder).store, len(folder.key) + 1 if folder.key else 0
    import obstore

    with _translated(folder):
        found = _tried_again(lambda: [e for page in obstore.list(store, prefix=folder.key or None) for e in page])
        return {each["path"][cut:]: _facts(each) for each in found if len(each["path"]) > cut}


def names(folder: BucketPath) -> list[str]:
    """The names of the objects and folders directly in a folder, sorted."""
    store = bucket_of(folder).store
    import obstore

    with _translated(folder):
        found = _tried_again(lambda: obstore.list_with_delimiter(store, prefix=folder.key or None))
    inside = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
    return sorted({path.rstrip("/").rpartition("/")[2] for path in inside})


LIST_TRIES = 4


def _tried_again(ask: Callable[[], Any]) -> Any:
    """The answer to a question. obstore does not ask again if the connection breaks within a list."""
    from obstore.exceptions import GenericError

    for number in range(LIST_TRIES):
        try:
            return ask()
        except GenericError:
            if number == LIST_TRIES - 1:
                raise
    raise AssertionError


# --- writing -------------------------------------------------------------------------------------------------------


def put_object(path: BucketPath, data: Any, *, only_if: Version | None = None) -> Version:
    """Writes an object by one request.

    Args:
        path: the object.
        data: a buffer.
        only_if: a version that the object must have, or ABSENT_OBJECT.

    Returns:
        The new version.

    Raises:
        ConditionLost: `only_if` does not hold.
    """
    bucket = bucket_of(path)
    with _translated(path, writes=True):
        try:
            return bucket.put(path.key, data, only_if)
        except FileNotFoundError:
            if not only_if:
                raise
            raise ConditionLost(str(path)) from None  # an object that is gone has no version


@contextmanager
def upload(path: BucketPath) -> Iterator[Callable[[Any], object]]:
    """A function that appends bytes to a new object of any size, which appears when the `with` ends without an
    error."""
    bucket = bucket_of(path)
    with _translated(path, writes=True), bucket.upload(path.key) as append:
        yield append


def copy_all(source: BucketPath, target: BucketPath, inside: Collection[str]) -> None:
    """Copies objects from one folder of a bucket to another, by their names, on the server."""
    bucket = bucket_of(source)

    def copy(name: str) -> None:
        with _translated(target / name, writes=True):
            bucket.copy((source / name).key, (target / name).key)

    for_each(copy, inside)


def remove_objects(folder: BucketPath, inside: Collection[str]) -> None:
    """Deletes objects of a folder, by their names from there. Missing ones do not matter."""
    bucket, keys = bucket_of(folder), [(folder / name).key for name in inside]
    if keys:
        try:
            with _translated(folder, writes=True):
                bucket.delete(keys)
        except FileNotFoundError:  # a store without a request for many says so of one that is gone
            for key in keys if len(keys) > 1 else ():
                remove_objects(folder, [key[len(folder.key) + 1 :]])


_Each = TypeVar("_Each")


def for_each(act: Callable[[_Each], object], items: Collection[_Each]) -> None:
    """Calls a function that makes requests for each of some items, several at a time, and raises what went wrong."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        for _ in pool.map(act, items):
            pass


# --- errors --------------------------------------------------------------------------------------------------------


def _facts(result: Any) -> ObjectFacts:
    return ObjectFacts(result["size"], _version(result), result["last_modified"])


def _version(result: Any) -> Version:
    return {key: result[key] for key in ("e_tag", "version") if result.get(key) is not None}


@contextmanager
def _translated(path: BucketPath, *, writes: bool = False) -> Iterator[None]:
    """Turns errors of obstore within the `with` into ours; a missing object into a FileNotFoundError with its name."""
    try:
        from obstore import exceptions
    except ImportError:
        yield  # `_connect` says that it is missing
        return
    hint = CREDENTIAL_HINTS[path.scheme]
    try:
        yield
    except FileNotFoundError as e:
        if e.errno is not None:  # of a local disk, within an upload
            raise
        if writes:
            raise BucketError(f"{path} cannot be written: there is no bucket {path.root}", hint="create it") from None
        raise FileNotFoundError(errno.ENOENT, "is missing", str(path)) from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
        raise ConditionLost(str(path)) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError):
        what = "written" if writes else "read"
        raise BucketError(
            f"{path} cannot be {what}: {SCHEMES[path.scheme]} refuses access", hint=f"ask for the right, or {hint}"
        ) from None
    except (exceptions.InvalidPathError, exceptions.UnknownConfigurationKeyError, exceptions.NotSupportedError) as e:
        raise UsageError(f"{path} cannot be used: {_first_line(e)}") from None
    except (exceptions.BaseError, OSError) as e:
        if isinstance(e, OSError) and e.errno is not None:  # of a local disk, within an upload
            raise
        text = _first_line(e)
        if re.search("credential|metadata server|token", text, re.IGNORECASE):
            raise BucketError(
                f"{path}: no credentials for {SCHEMES[path.scheme]} were found: {text}", hint=hint
            ) from None
        raise BucketError(
            f"{path} cannot be {'written' if writes else 'read'}: {text}",
            hint="check the network and the settings, and run the same command: it resumes where it stopped",
        ) from None


def _first_line(error: BaseException) -> str:
    """What an error says, without the queries of URLs: those of Azure hold signatures."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"\?\S*", "", line)
