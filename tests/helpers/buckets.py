"""Buckets in memory, whose requests can be counted, lost or refused."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import obstore
from obstore.store import MemoryStore

from tpuconv import buckets
from tpuconv.buckets import Bucket
from tpuconv.location import BucketPath, to_location

ROOT = "gs://bkt"


class Killed(BaseException):
    """The process ends here: nothing handles it."""


class MemoryBucket(Bucket):
    """A bucket in memory. `log` has every request that changes it. The one with the number `at` fails with `error`,
    before or, if `late`, after it took effect; if that is Killed, all later ones do."""

    def __init__(self) -> None:
        super().__init__(ROOT, MemoryStore())
        self.log: list[str] = []
        self.at: int | None = None
        self.late = False
        self.error: type[BaseException] | BaseException = Killed

    def put(self, key: str, data: Any, only_if: Any = None) -> Any:
        # The store would keep the memory itself, which is used again.
        return self._request(f"put {key}", lambda: Bucket.put(self, key, bytes(data), only_if))

    @contextmanager
    def upload(self, key: str) -> Iterator[Callable[[Any], object]]:
        parts: list[bytes] = []
        yield lambda data: parts.append(bytes(data))
        self._request(f"upload {key}", lambda: Bucket.put(self, key, b"".join(parts)))

    def copy(self, key: str, target: str, *, overwrite: bool = True) -> None:
        self._request(f"copy {target}", lambda: Bucket.copy(self, key, target, overwrite=overwrite))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # a request for many may be done in part
            self._request(f"delete {key}", lambda key=key: Bucket.delete(self, [key]))

    def delete_if(self, key: str, version: Mapping[str, str]) -> bool | None:
        def delete() -> bool:
            try:
                if obstore.head(self.store, key)["e_tag"] != version["e_tag"]:
                    return False
            except FileNotFoundError:
                return False
            Bucket.delete(self, [key])
            return True

        return bool(self._request(f"delete {key}", delete))

    def _request(self, what: str, act: Callable[[], Any]) -> Any:
        number = len(self.log)
        self.log.append(what)
        is_dead = self.at is not None and self.error is Killed and number > self.at
        if is_dead or (number == self.at and not self.late):
            raise self.error
        result = act()
        if number == self.at:
            raise self.error
        return result


def in_memory(monkeypatch: Any) -> MemoryBucket:
    """gs://bkt as a new bucket in memory, until the test ends."""
    bucket = MemoryBucket()
    monkeypatch.setitem(buckets.OPEN, ROOT, bucket)
    return bucket


def objects(url: str) -> dict[str, bytes]:
    """Every object in a folder with its bytes, by its name from there."""
    folder = to_location(url)
    assert isinstance(folder, BucketPath)
    return {name: bytes(buckets.read(folder / name)) for name in buckets.listing(folder)}
