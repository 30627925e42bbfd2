"""Objects in buckets, by obstore (extra `cloud`). No other module makes requests to an object store.

Objects appear complete or not at all, and are durable when a write returns. Functions that write raise BucketError if
the store refuses or cannot be reached, after retries; a missing object is a FileNotFoundError, as on a disk.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.util import find_spec
from typing import Any, TypeVar

from tpuconv.bucket_errors import ConditionLost, translated
from tpuconv.credentials import credentials, endpoint, google_token
from tpuconv.errors import UsageError
from tpuconv.extras import install_command
from tpuconv.location import SCHEMES, BucketPath
from tpuconv.object_requests import REQUEST_RETRIES, UploadedBytes, delete_if

Version = Mapping[str, str]
"""The version of an object's contents: `e_tag`, and `version` if the store has one."""
ABSENT_OBJECT: Version = {}
"""The condition of a write that there is no object yet."""

REQUESTS = 16
"""Requests for small objects at a time."""
DELETED_AT_ONCE = 1000
COPIES = 64
"""Copies at a time, which the server makes."""
PART_BYTES_OF_UPLOADS = 32 << 20
"""The parts of an object that is written from start to end: 10,000 of them, the most that stores take, are 320 GB."""

PARTS_AT_A_TIME = 4
"""The number of parts at a time. Each part is in memory until it is written."""

CLIENT = {"timeout": "300s", "connect_timeout": "10s"}
SILENCE = {"read_timeout": "60s"}
"""The longest time without a byte of an answer to a request that reads. Of others it would count the time in which
bytes are sent, or the store copies."""
BUCKET_RETRIES: dict[str, Any] = {"max_retries": REQUEST_RETRIES, "retry_timeout": timedelta(minutes=3)}


class SourceGone(Exception):
    """There is no object to be copied."""


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
        reading: the same with SILENCE, for requests that read.
    """

    def __init__(self, root: str, store: Any, reading: Any = None):
        self.root, self.store, self.reading = root, store, reading or store

    def put(self, key: str, data: Any, only_if: Version | None = None) -> Version:
        """Writes an object by one request; see `put_object`."""
        import obstore

        mode: Any = "overwrite" if only_if is None else dict(only_if) or "create"
        # A PUT of its own, not in parts: the condition holds for it, and nothing is left if it fails.
        return _version(obstore.put(self.store, key, data, mode=mode, use_multipart=False))

    @contextmanager
    def upload(self, key: str) -> Iterator[Callable[[Any], object]]:
        """Yields a function that appends bytes to a new object, which appears when the `with` ends without an error.
        After an error the store is told to forget the parts."""
        import obstore

        parts = UploadedBytes()
        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(
                obstore.put,
                self.store,
                key,
                parts,
                use_multipart=True,
                chunk_size=PART_BYTES_OF_UPLOADS,
                max_concurrency=PARTS_AT_A_TIME,
            )
            done.add_done_callback(lambda _: parts.end())
            try:
                yield parts.append
            except BaseException:
                parts.fail()
                raise
            parts.close()
            done.result()

    def copy(self, key: str, target: str, *, overwrite: bool = True) -> None:
        """Copies an object within the bucket; its bytes do not come through this machine."""
        import obstore

        obstore.copy(self.store, key, target, overwrite=overwrite)

    def delete(self, keys: Sequence[str]) -> None:
        """Deletes objects, in any order."""
        import obstore

        obstore.delete(self.store, list(keys))

    def delete_if(self, key: str, version: Version) -> bool | None:
        """Deletes an object if it has a version; see `tpuconv.object_requests.delete_if`."""
        scheme, _, name = self.root.partition("://")
        return delete_if(self.store, scheme, name, key, version, google_token)


OPEN: dict[str, Bucket] = {}
"""The buckets that were opened, by URL."""
_opening = threading.Lock()


def bucket_of(path: BucketPath) -> Bucket:
    """Returns the bucket of a path.

    Raises:
        UsageError: obstore is not installed.
        BucketError: the settings of the environment are not valid.
    """
    with _opening:
        if path.root not in OPEN:
            with translated(path):
                OPEN[path.root] = Bucket(path.root, *_connect(path))
        return OPEN[path.root]


def _connect(path: BucketPath) -> tuple[Any, Any]:
    if find_spec("obstore") is None:
        raise UsageError(
            f"{path.root} is in {SCHEMES[path.scheme]}, and obstore is not installed",
            hint=install_command("cloud"),
        )
    from obstore.store import from_url

    is_plain = (endpoint(path.scheme) or "").startswith("http://")
    options: dict[str, Any] = {}
    client = CLIENT | ({"allow_http": True} if is_plain else {})
    if path.scheme == "s3" and not is_plain:
        options["unsigned_payload"] = True  # TLS protects the bytes, and hashing them takes longer than sending them
    _, provider = credentials(path.scheme)
    if provider is not None:
        options["credential_provider"] = provider()
    return (
        from_url(path.root, retry_config=BUCKET_RETRIES, client_options=client, **options),  # type: ignore[call-overload]
        from_url(path.root, retry_config=BUCKET_RETRIES, client_options=client | SILENCE, **options),  # type: ignore[call-overload]
    )


# --- reading -------------------------------------------------------------------------------------------------------


def read(path: BucketPath, start: int = 0, stop: int | None = None) -> memoryview:
    """Returns the bytes [start, stop) of an object, all of it by default.

    Raises:
        FileNotFoundError: there is no such object.
    """
    store = bucket_of(path).reading
    import obstore

    with translated(path):
        if stop is None:
            return memoryview(obstore.get(store, path.key).bytes())
        return memoryview(obstore.get_range(store, path.key, start=start, end=stop))


def read_object(path: BucketPath) -> tuple[bytes, ObjectFacts]:
    """Returns the bytes of an object, and its facts when they were read.

    Raises:
        FileNotFoundError: there is no such object.
    """
    store = bucket_of(path).reading
    import obstore

    with translated(path):
        found = obstore.get(store, path.key)
        return bytes(found.bytes()), _facts(found.meta)


def read_ranges(path: BucketPath, starts: Sequence[int], length: int) -> list[memoryview]:
    """Returns some bytes of an object from each of `starts` on, requested together."""
    store = bucket_of(path).reading
    import obstore

    with translated(path):
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
    store = bucket_of(path).reading
    import obstore

    options: Any = {"range": span} if span else {}
    if "e_tag" in version:
        options["if_match"] = version["e_tag"]
    with translated(path):
        blocks = iter(obstore.get(store, path.key, options=options).stream(min_chunk_size=block_bytes))
    while True:
        with translated(path):
            block = next(blocks, None)
        if block is None:
            return
        yield memoryview(block)


def facts(path: BucketPath) -> ObjectFacts | None:
    """Returns the facts of an object; None if there is none."""
    if not path.key:
        return None
    store = bucket_of(path).reading
    import obstore

    try:
        with translated(path):
            found = obstore.head(store, path.key)
    except FileNotFoundError:
        return None
    return _facts(found)


def listing(folder: BucketPath) -> dict[str, int]:
    """Returns the size of every object in a folder and its folders, by its name from there."""
    return {name: found.size for name, found in listing_facts(folder).items()}


def listing_facts(folder: BucketPath) -> dict[str, ObjectFacts]:
    """Returns the facts of every object in a folder and its folders, by its name from there."""
    store, cut = bucket_of(folder).reading, len(folder.key) + 1 if folder.key else 0
    import obstore

    with translated(folder, "listed"):
        found = _tried_again(lambda: [e for page in obstore.list(store, prefix=folder.key or None) for e in page])
        return {each["path"][cut:]: _facts(each) for each in found if len(each["path"]) > cut}


def names(folder: BucketPath) -> list[str]:
    """Returns the names of the objects and folders directly in a folder, sorted."""
    store = bucket_of(folder).reading
    import obstore

    with translated(folder, "listed"):
        found = _tried_again(lambda: obstore.list_with_delimiter(store, prefix=folder.key or None))
    inside = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
    return sorted({path.rstrip("/").rpartition("/")[2] for path in inside})


LIST_TRIES = 4


def _tried_again(ask: Callable[[], Any]) -> Any:
    """Returns the answer to a question. obstore does not ask again if the connection breaks within a list."""
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
    with translated(path, "written"):
        try:
            return bucket.put(path.key, data, only_if)
        except FileNotFoundError:
            if not only_if:
                raise
            raise ConditionLost(str(path)) from None  # an object that is gone has no version


@contextmanager
def upload(path: BucketPath) -> Iterator[Callable[[Any], object]]:
    """Yields a function that appends bytes to a new object of any size, which appears when the `with` ends without an
    error."""
    bucket = bucket_of(path)
    with translated(path, "written"), bucket.upload(path.key) as append:
        yield append


def copy_object(source: BucketPath, target: BucketPath, *, overwrite: bool = True) -> None:
    """Copies an object within a bucket, on the server.

    Raises:
        SourceGone: there is no source.
        ConditionLost: there is a target, and it must not be overwritten.
    """
    bucket = bucket_of(source)
    with translated(target, "written"):
        try:
            bucket.copy(source.key, target.key, overwrite=overwrite)
        except FileNotFoundError:
            raise SourceGone(str(source)) from None


def delete_object(path: BucketPath, version: Version) -> bool | None:
    """Deletes an object if it has a version. Returns whether it had; None if this store or client cannot ask for
    that."""
    bucket = bucket_of(path)
    with translated(path, "deleted"):
        return bucket.delete_if(path.key, version)


def is_same(version: Version, other: Version) -> bool:
    """Returns True if two versions of an object are equal, by the store's description of both."""
    common = version.keys() & other.keys()
    return bool(common) and all(version[key].strip('"') == other[key].strip('"') for key in common)


def remove_objects(folder: BucketPath, inside: Collection[str]) -> None:
    """Deletes objects of a folder, by their names from there. Missing ones do not matter."""
    bucket, keys = bucket_of(folder), [(folder / name).key for name in inside]
    with translated(folder, "deleted"):
        for start in range(0, len(keys), DELETED_AT_ONCE):
            _remove(bucket, keys[start : start + DELETED_AT_ONCE])


def _remove(bucket: Bucket, keys: Sequence[str]) -> None:
    try:
        bucket.delete(keys)
    except FileNotFoundError:  # a store without a request for many says so of one that is gone
        for key in keys if len(keys) > 1 else ():
            _remove(bucket, [key])


_Each = TypeVar("_Each")


def for_each(act: Callable[[_Each], object], items: Collection[_Each], at_a_time: int | None = None) -> None:
    """Calls a function that makes requests for each of some items, several at a time, and raises what went wrong."""
    if len(items) == 1 or at_a_time == 1:
        for item in items:
            act(item)
        return
    with ThreadPoolExecutor(at_a_time or REQUESTS) as pool:
        for _ in pool.map(act, items):
            pass


def _facts(result: Any) -> ObjectFacts:
    return ObjectFacts(result["size"], _version(result), result["last_modified"])


def _version(result: Any) -> Version:
    return {key: result[key] for key in ("e_tag", "version") if result.get(key) is not None}
