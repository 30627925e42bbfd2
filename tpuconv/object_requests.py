"""Requests to object stores that obstore does not have: deletes under a condition, by one request each, signed by
obstore (S3, Azure) or with the token of google-auth (GCS); and uploads of bytes that come piece by piece."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from tpuconv.credentials import endpoint

SIGNED_FOR = timedelta(seconds=60)
"""A request that a suspended process sends later than this is refused: the server looks at its own clock."""
REQUEST_SECONDS = 30.0
REQUEST_RETRIES = 8
"""The number of times that a request is repeated, by obstore too."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 15.0
"""The seconds before the first repetition; each pause is twice as long as the last one."""
GONE, LOST = 404, (404, 409, 412)
UNABLE = (400, 403, 405, 501)
"""Not with the rights of this client, or not on this server."""


def delete_if(
    store: Any, scheme: str, bucket: str, key: str, version: Mapping[str, str], token: Callable[[], str | None]
) -> bool | None:
    """Deletes an object if it has a version.

    Args:
        store: of obstore.
        scheme: of the URL of the bucket.
        bucket: its name.
        key: of the object.
        version: that the object must have.
        token: returns a token for GCS; None if there is none.

    Returns:
        Whether the object had the version, and is gone; None if this client cannot ask for it.

    Raises:
        OSError: the request failed.
    """
    if scheme == "gs":
        bearer = token()
        if bearer is None or "version" not in version:
            return None
        from urllib.parse import quote

        base = endpoint("gs") or "https://storage.googleapis.com"
        name, generation = quote(key, safe=""), version["version"]
        url = f"{base}/storage/v1/b/{bucket}/o/{name}?ifGenerationMatch={generation}"
        return _delete(lambda: url, {"Authorization": f"Bearer {bearer}"})
    if scheme not in ("s3", "az") or "e_tag" not in version:
        return None
    import obstore
    from obstore.exceptions import BaseError

    try:
        return _delete(lambda: obstore.sign(store, "DELETE", key, SIGNED_FOR), {"If-Match": version["e_tag"]})
    except (BaseError, ValueError):  # credentials that cannot sign, such as a SAS key of Azure
        return None


def _delete(signed: Callable[[], str], headers: Mapping[str, str]) -> bool | None:
    from http.client import HTTPException
    from urllib.error import HTTPError  # these take 15 ms of every command
    from urllib.request import Request, urlopen

    for number in range(REQUEST_RETRIES + 1):
        if number:
            time.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (number - 1)))
        try:
            with urlopen(Request(signed(), method="DELETE", headers=dict(headers)), timeout=REQUEST_SECONDS):
                return True
        except HTTPError as e:
            if e.code in LOST:
                # A repeated request may find that the first one, whose answer was lost, deleted the object.
                return e.code == GONE and number > 0
            if e.code in UNABLE:
                return None
            failure = f"the store answered {e.code} to a DELETE"
            if e.code < 500 and e.code != 429:
                break
        except (OSError, HTTPException) as e:
            failure = f"no answer to a DELETE: {getattr(e, 'reason', e)}"
    raise OSError(failure)


class UploadedBytes:
    """The bytes of an upload, from the thread that makes them to the one that sends them."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes | None] = queue.Queue(1)
        self._ended = threading.Event()
        self._failed = False

    def append(self, data: Any) -> None:
        """Hands over some bytes, which may be changed afterwards. If the upload has ended with an error, nothing
        happens: it is raised at the end."""
        self._put(bytes(data))

    def _put(self, data: bytes | None) -> None:
        while not self._ended.is_set():
            with suppress(queue.Full):
                self._queue.put(data, timeout=0.1)
                return

    def close(self) -> None:
        """Says that these are all bytes."""
        self._put(None)

    def fail(self) -> None:
        """Says that the object must not appear."""
        self._failed = True
        self._put(None)

    def end(self) -> None:
        """Called when nobody takes bytes any more."""
        self._ended.set()

    def __iter__(self) -> Iterator[bytes]:
        while (data := self._queue.get()) is not None:
            yield data
        if self._failed:
            raise UploadCancelled


class UploadCancelled(Exception):
    """The body of an upload ended with an error."""
