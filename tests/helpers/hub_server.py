"""A Hub of our own on the loopback interface: as much of its API as the client speaks, with faults on request.

Like the Hub it redirects large files to another host (here another port), so that a token sent there would be seen.
"""

import hashlib
import json
import re
import struct
import threading
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, SO_LINGER, SOL_SOCKET, socket
from types import TracebackType
from urllib.parse import unquote, urlsplit

BLOCK = 1 << 14


@dataclass
class Fault:
    """What goes wrong with requests for `file` (a pattern; "api" is the API): a status, a break, or wrong bytes."""

    file: str
    status: int | None = None
    code: str = ""  # X-Error-Code
    break_after: int | None = None  # bytes of a body, then the connection is closed
    reset: bool = False  # closed by a reset, not by an end
    hang: bool = False  # the connection stays open and silent until `mend`
    silent: bool = False  # no answer at all until `mend`
    corrupt: bool = False  # every byte of weights is inverted
    corrupt_header: bool = False  # and of the header
    no_ranges: bool = False
    times: int | None = None  # how often; None is for ever
    released: threading.Event = field(default_factory=threading.Event)


@dataclass
class Request:
    """A request as the server saw it. `sent` counts bytes of the body."""

    method: str
    path: str
    file: str
    token: str | None
    range: tuple[int, int] | None
    cdn: bool
    sent: int = 0


@dataclass(frozen=True)
class Repo:
    """A repository: its commits as folders, its branches and tags as commits."""

    commits: dict[str, Path]
    refs: dict[str, str]


class HubServer:
    """`with HubServer({"org/name": folder}) as hub:` serves at `hub.url`. A mapping of revisions to folders serves as
    branches; the commit is a hash of the folder's content."""

    def __init__(self, repos: Mapping[str, Path | Mapping[str, Path]]):
        self.repos: dict[str, Repo] = {}
        for name, revisions in repos.items():
            folders = {"main": revisions} if isinstance(revisions, Path) else dict(revisions)
            refs = {ref: commit_of(folder) for ref, folder in folders.items()}
            self.repos[name] = Repo({refs[ref]: folder for ref, folder in folders.items()}, refs)
        self.private: dict[str, bool] = {}
        self.pushed: dict[str, dict[str, dict[str, bytes]]] = {}  # files by repository and branch
        self.objects: dict[str, bytes] = {}  # large files by hash
        self.users: dict[str, str] = {}  # names by token
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self.connections: set[socket] = set()
        self._servers = [self._serve(), self._serve(cdn=True)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def cdn(self) -> str:
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def commit(self, repo: str, ref: str = "main") -> str:
        return self.repos[repo].refs[ref]

    def fail(self, file: str, **fault: object) -> None:
        self.faults.append(Fault(file, **fault))  # type: ignore[arg-type]

    def mend(self) -> None:
        """Ends every fault."""
        for fault in self.faults:
            fault.released.set()
        self.faults.clear()

    def sent(self, pattern: str = "*") -> int:
        """Bytes of file bodies that were sent."""
        return sum(r.sent for r in self.requests if fnmatchcase(r.file, pattern))

    def files(self) -> set[str]:
        """The files of which something was sent."""
        return {r.file for r in self.requests if r.sent and r.file != "api"}

    def forget(self) -> None:
        self.requests.clear()

    def stop(self) -> None:
        self.mend()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self._servers = []
        for connection in list(self.connections):  # those that are kept alive
            with suppress(OSError):
                connection.shutdown(SHUT_RDWR)

    def __enter__(self) -> "HubServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._servers:
            self.stop()

    def _serve(self, cdn: bool = False) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self, "cdn": cdn}))
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


def commit_of(folder: Path) -> str:
    digest = hashlib.sha1()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    cdn: bool
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None: ...

    def setup(self) -> None:
        super().setup()
        self.hub.connections.add(self.connection)

    def finish(self) -> None:
        self.hub.connections.discard(self.connection)
        super().finish()

    def do_POST(self) -> None:
        """Uploads: a repository, a branch, how files go, where large ones go, and the commit."""
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._log("upload")
        if self._fault("upload"):
            return None
        if path == "/api/repos/create":
            facts = json.loads(body)
            name = f"{facts['organization']}/{facts['name']}"
            if name in self.hub.pushed:
                return self._json({"url": f"{self.hub.url}/{name}"}, 409)
            self.hub.pushed[name] = {"main": {}}
            self.hub.private[name] = facts.get("visibility") == "private"
            return self._json({"url": f"{self.hub.url}/{name}"})
        if path == "/api/validate-yaml":  # of a model card
            return self._json({"errors": [], "warnings": [{"message": "no metadata"}]})
        if match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [
                {"oid": x["oid"], "size": x["size"]}
                | ({} if x["oid"] in self.hub.objects else {"actions": {"upload": {"href": self._object(x["oid"])}}})
                for x in json.loads(body)["objects"]
            ]
            return self._json({"objects": objects, "transfer": "basic"})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path)
        assert match, path
        name, action, branch = match.groups()
        branches = self.hub.pushed[name]
        if action == "branch":
            branches.setdefault(branch, {})
            return self._json({})
        if action == "preupload":
            kinds = [
                {"path": x["path"], "uploadMode": "lfs" if x["size"] > 4096 else "regular", "shouldIgnore": False}
                for x in json.loads(body)["files"]
            ]
            return self._json({"files": kinds})
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                branches[branch][value["path"]] = b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del branches[branch][value["path"]]
            elif line["key"] == "lfsFile":
                branches[branch][value["path"]] = self.hub.objects[value["oid"]]
        oid = git_id(body)
        return self._json({"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def do_PUT(self) -> None:
        """A large file, at the other host."""
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self._log("object")
        if not self._fault("object"):
            self.hub.objects[hashlib.sha256(data).hexdigest()] = data
            self._refuse(200, "")

    def _object(self, oid: str) -> str:
        return f"{self.hub.cdn}/objects/{oid}"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            self._log("api")
            if self._fault("api"):
                return
            self._api(path.removeprefix("/api/models/"))
        elif path == "/api/whoami-v2":
            self._log("whoami")
            if self._fault("whoami"):
                return
            name = self.hub.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
            self._json({"name": name}) if name else self._refuse(401, "")
        elif path in ("", "/"):
            self._log("home")
            if not self._fault("home"):
                self._json({})
        elif match := re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", path):
            self._file(*match.groups())
        else:
            self._log("other")  # the client asks for more than models, for itself
            self._refuse(404, "")

    def _api(self, path: str) -> None:
        match = re.fullmatch(r"(.+?)(?:/revision/(.+)|/(refs)|/tree/(.+))?", path)
        assert match
        name, revision, refs, tree = match.groups()
        if tree:
            items = [
                {"type": "file", "path": path_, "size": len(data), "oid": git_id(data)}
                for path_, data in self.hub.pushed[name][tree].items()
            ]
            return self._json(items)
        repo = self.hub.repos.get(name)
        if name in self.hub.pushed:
            return self._json({"id": name, "modelId": name, "private": self.hub.private[name], "siblings": []})
        if repo is None:
            return self._refuse(404, "RepoNotFound")
        if refs:
            items = [{"name": r, "ref": f"refs/heads/{r}", "targetCommit": c} for r, c in repo.refs.items()]
            return self._json({"branches": items, "tags": [], "converts": []})
        commit = repo.refs.get(revision or "main", revision or "")
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        siblings = []
        for path_ in sorted(p for p in repo.commits[commit].rglob("*") if p.is_file()):
            item: dict[str, object] = {"rfilename": path_.relative_to(repo.commits[commit]).as_posix()}
            if "blobs=" in self.path:
                size = path_.stat().st_size
                item |= {"size": size, "blobId": git_id(path_.read_bytes())}
                if is_lfs(path_.name):
                    item["lfs"] = {"size": size, "sha256": sha256_of(path_), "pointerSize": 130}
            siblings.append(item)
        return self._json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})

    def _pushed(self, data: bytes | None) -> None:
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        self.send_response(200)
        self.send_header("ETag", f'"{git_id(data)}"')
        self.send_header("X-Repo-Commit", git_id(b"pushed"))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def _file(self, name: str, revision: str, file: str) -> None:
        request = self._log(file)
        repo = self.hub.repos.get(name)
        fault = self._fault(file)
        if fault is True:
            return None
        if name in self.hub.pushed:
            return self._pushed(self.hub.pushed[name].get(revision, {}).get(file))
        if repo is None:
            return self._refuse(404, "RepoNotFound")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return self._refuse(404, "RevisionNotFound")
        path = repo.commits[commit] / file
        if not path.is_file():
            return self._refuse(404, "EntryNotFound")
        data = path.read_bytes()
        tag = sha256_of(path) if is_lfs(file) else git_id(data)
        if is_lfs(file) and not self.cdn:
            self.send_response(302)
            self.send_header("Location", self.hub.cdn + self.path)
            self.send_header("X-Linked-Etag", f'"{tag}"')
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if isinstance(fault, Fault) and fault.corrupt:
            start = 0 if fault.corrupt_header else 8 + int.from_bytes(data[:8], "little")
            data = data[:start] + bytes(255 - b for b in data[start:])
        start, end = 0, len(data)
        ranged = request.range is not None and not (isinstance(fault, Fault) and fault.no_ranges)
        if ranged and request.range:
            start, end = request.range[0], min(request.range[1] + 1, len(data))
            if start >= len(data):
                return self._refuse(416, "")
        self.send_response(206 if ranged else 200)
        self.send_header("ETag", f'"{tag}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self._body(request, data[start:end], fault if isinstance(fault, Fault) else None)
        return None

    def _body(self, request: Request, data: bytes, fault: Fault | None) -> None:
        stop = fault.break_after if fault and fault.break_after is not None else len(data)
        for at in range(0, min(stop, len(data)), BLOCK):
            block = data[at : min(at + BLOCK, stop)]
            with self.hub.lock:  # before: the client may have all of it, and go on, before this thread does
                request.sent += len(block)
            try:
                self.wfile.write(block)
            except OSError:  # the client went away
                with self.hub.lock:
                    request.sent -= len(block)
                self.close_connection = True
                return
        if fault and fault.break_after is not None and stop < len(data):
            if fault.hang:
                fault.released.wait()
            if fault.reset:
                self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    def _log(self, file: str) -> Request:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        span = (int(match[1]), int(match[2] or 1 << 60)) if match else None
        token = self.headers.get("Authorization")
        request = Request(self.command, self.path, file, token, span, self.cdn)
        with self.hub.lock:
            self.hub.requests.append(request)
        return request

    def _fault(self, file: str) -> Fault | bool:
        """The fault to inject in the body, or True if the request has been refused here, or False."""
        with self.hub.lock:
            fault = next((f for f in self.hub.faults if fnmatchcase(file, f.file) and f.times != 0), None)
            in_body = fault is not None and fault.status is None
            if fault is None or (in_body and (self.command != "GET" or (is_lfs(file) and not self.cdn))):
                return False
            if fault.times is not None:
                fault.times -= 1
        if fault.silent:
            fault.released.wait()
            self.close_connection = True
            return True
        if in_body:
            return fault
        self._refuse(fault.status or 500, fault.code)
        return True

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":  # else the next answer would begin with it
            self.wfile.write(body)
