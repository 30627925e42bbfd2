"""A small Google Cloud Storage on loopback: as much of its JSON and XML interfaces as TensorStore, gcsfs (so Orbax) and
obstore use. Objects of all buckets lie in one dict. Faults can be injected, by a function of the request."""

import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Fault = Callable[[str, str], int | None]
"""Of method and key: a status to answer with, -1 to cut the connection within the body, or None."""


@dataclass
class Objects:
    """What the server holds: generation, time and bytes of each object by its key, `BUCKET/NAME`."""

    contents: dict[str, tuple[int, float, bytes]] = field(default_factory=dict)
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    parts: dict[str, dict[int, bytes]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    fault: Fault = lambda method, key: None
    requests: list[tuple[str, str]] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    objects: Objects

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", headers: Any = (), kind: str = "application/json") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": kind, **dict(headers)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self.cut else body)
        if self.cut:
            self.close_connection = True

    def metadata(self, key: str) -> dict[str, str]:
        generation, when, data = self.objects.contents[key]
        bucket, _, name = key.partition("/")
        time = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        facts = {"kind": "storage#object", "name": name, "bucket": bucket, "size": str(len(data))}
        facts |= {"generation": str(generation), "metageneration": "1", "etag": str(generation)}
        return facts | {"updated": time, "timeCreated": time}

    def answer(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = re.fullmatch(r"(?:/upload|/download)?/storage/v1/b/([^/]+)(?:/(o)(?:/(.+))?)?", url.path)
        bucket, name = (found[1], found[3]) if found else url.path.lstrip("/").partition("/")[::2]
        name = unquote(name or "") or query.get("name", "")
        if query.get("uploadType") == "multipart":  # gcsfs: a part of metadata, then one of data
            mark = re.search("boundary=['\"]?([^'\";]+)", self.headers["Content-Type"])[1].encode()  # type: ignore[index]
            (_, facts), (_, body) = (re.split(b"\r?\n\r?\n", p, maxsplit=1) for p in body.split(b"--" + mark)[1:3])
            name, body = json.loads(facts)["name"], re.sub(b"\r?\n\\Z", b"", body)
        key = f"{bucket}/{name}"
        self.objects.requests.append((self.command, key))
        status = self.objects.fault(self.command, key)
        self.cut = status == -1
        if status not in (None, -1):
            self.reply(status, b"no")
            return
        with self.objects.lock:
            self.perform(query, key, body, bool(found), bool(found and found[2]), name)

    def perform(self, query: dict[str, str], key: str, body: bytes, is_json: bool, is_object: bool, name: str) -> None:
        contents = self.objects.contents
        want = query.get("ifGenerationMatch", self.headers.get("x-goog-if-generation-match"))
        if self.command != "GET" and want is not None and int(want) != contents.get(key, (0,))[0]:
            self.reply(412)
        elif self.command in ("PUT", "POST", "DELETE") and {"uploads", "uploadId"} & query.keys():
            self.upload_in_parts(query, key, body)
        elif self.command in ("PUT", "POST"):
            if source := self.headers.get("x-goog-copy-source"):
                body = contents[unquote(source).lstrip("/")][2]
            generation = next(self.objects.generations)
            contents[key] = generation, datetime.now(UTC).timestamp(), body
            headers = [("ETag", f'"{generation}"'), ("x-goog-generation", str(generation))]
            self.reply(200, json.dumps(self.metadata(key)).encode(), headers)
        elif self.command == "DELETE":
            self.reply(204 if contents.pop(key, None) else 404)
        elif is_json and not is_object:
            self.reply(200, json.dumps({"name": key.partition("/")[0], "location": "US"}).encode())
        elif (is_json and not name) or "list-type" in query:
            self.list(query, key.partition("/")[0], is_json)
        elif key not in contents:
            self.reply(404)
        elif is_json and query.get("alt") != "media":
            self.reply(200, json.dumps(self.metadata(key)).encode())
        else:
            self.get(query, *contents[key])

    def upload_in_parts(self, query: dict[str, str], key: str, body: bytes) -> None:
        generation = next(self.objects.generations)
        if "uploads" in query:
            self.objects.parts[str(generation)] = {}
            names = f"<Bucket>b</Bucket><Key>k</Key><UploadId>{generation}</UploadId>"
            text = f"<InitiateMultipartUploadResult>{names}</InitiateMultipartUploadResult>"
        elif self.command == "PUT":
            self.objects.parts[query["uploadId"]][int(query["partNumber"])] = body
            self.reply(200, b"", [("ETag", f'"{generation}"')])
            return
        else:
            parts = self.objects.parts.pop(query["uploadId"])
            if self.command == "DELETE":
                self.reply(204)
                return
            data = b"".join(parts[number] for number in sorted(parts))
            self.objects.contents[key] = generation, datetime.now(UTC).timestamp(), data
            text = f'<CompleteMultipartUploadResult><ETag>"{generation}"</ETag></CompleteMultipartUploadResult>'
        self.reply(200, text.encode(), [("x-goog-generation", str(generation))], "application/xml")

    def get(self, query: dict[str, str], generation: int, when: float, data: bytes) -> None:
        if query.get("ifGenerationNotMatch") == str(generation):
            self.reply(304)
            return
        headers = [("ETag", f'"{generation}"'), ("x-goog-generation", str(generation))]
        headers.append(("Last-Modified", formatdate(when, usegmt=True)))
        span = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if span is None:
            self.reply(200, data, headers, "application/octet-stream")
            return
        first = int(span[1]) if span[1] else max(0, len(data) - int(span[2]))
        stop = min(int(span[2] or 1 << 60) + 1, len(data)) if span[1] else len(data)
        if first >= len(data):
            self.reply(416)
            return
        headers.append(("Content-Range", f"bytes {first}-{stop - 1}/{len(data)}"))
        self.reply(206, data[first:stop], headers, "application/octet-stream")

    def list(self, query: dict[str, str], bucket: str, is_json: bool) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        first, end, cut = query.get("startOffset", ""), query.get("endOffset", "\U0010ffff"), len(prefix)
        names = sorted(key[len(bucket) + 1 :] for key in self.objects.contents if key.startswith(f"{bucket}/"))
        names = [name for name in names if name.startswith(prefix) and first <= name < end]
        deeper = {n[: n.index(delimiter, cut) + 1] for n in names if delimiter and delimiter in n[cut:]}
        names = [name for name in names if not (delimiter and delimiter in name[cut:])]
        if is_json:
            items = [self.metadata(f"{bucket}/{name}") for name in names]
            self.reply(200, json.dumps({"items": items, "prefixes": sorted(deeper)}).encode())
            return
        rows = "".join(
            f"<Contents><Key>{escape(facts['name'])}</Key><LastModified>{facts['updated']}</LastModified>"
            f'<ETag>"{facts["etag"]}"</ETag><Size>{facts["size"]}</Size></Contents>'
            for facts in (self.metadata(f"{bucket}/{name}") for name in names)
        )
        rows += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(deeper))
        self.reply(200, f"<ListBucketResult>{rows}</ListBucketResult>".encode(), kind="application/xml")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer


@contextmanager
def fake_gcs() -> Iterator[tuple[str, Objects]]:
    """A running server: its address, and what it holds."""
    objects = Objects()

    class Own(Handler):
        pass

    Own.objects = objects
    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients that went away
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", objects
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(url: str) -> dict[str, str]:
    """By which obstore, gcsfs and TensorStore take this server for the cloud's."""
    return {
        "GOOGLE_BASE_URL": url,
        "GOOGLE_BEARER_TOKEN": "t",
        "TENSORSTORE_GCS_HTTP_URL": url,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "t",
        "STORAGE_EMULATOR_HOST": url,
        "FSSPEC_GCS_TOKEN": "anon",
        "NO_GCE_CHECK": "true",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
    }
