"""A server on loopback that speaks as much of the Hugging Face hub's protocol as downloads need."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_secret"
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")
_LIST = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/revision/main(?:\?.*)?")
LARGE = 1 << 20  # bytes: files from this size on have the ETag of large files


class LocalHub(ThreadingHTTPServer):
    """`repositories`: OWNER/NAME to {path in it: content}. `private`, `gated`: those that ask for TOKEN, or refuse all.

    `stop_after`: bytes of a large file after which a response stands still, until `go_on` is set. `requests`: method,
    path and Range header of each. `sent`: bytes of file contents in all.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.broken = False
        self.stop_after: int | None = None
        self.stopped = threading.Event()
        self.go_on = threading.Event()
        self.requests: list[tuple[str, str, str | None]] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, repo: str, files: dict[str, bytes | Path]) -> None:
        self.repositories[repo] = {
            name: content.read_bytes() if isinstance(content, Path) else content for name, content in files.items()
        }

    def handle_error(self, request: object, client_address: object) -> None:
        """Report nothing: a killed client breaks its connections."""


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub = self.server
        hub.requests.append((self.command, self.path, self.headers["Range"]))
        match = _LIST.fullmatch(self.path) or _FILE.fullmatch(self.path)
        repo = match["repo"] if match else ""
        files = hub.repositories.get(repo)
        if hub.broken:
            return self._json(503, {"error": "down"})
        if files is None or (repo in hub.private and self.headers["Authorization"] != f"Bearer {TOKEN}"):
            return self._json(401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        assert match is not None
        if "file" not in match.groupdict():
            return self._json(200, _listing(repo, files))
        if repo in hub.gated:
            return self._json(403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        content = files.get(match["file"])
        if content is None:
            return self._json(404, {"error": "no entry"}, {"X-Error-Code": "EntryNotFound"})
        return self._file(content, body=body)

    def _file(self, content: bytes, *, body: bool) -> None:
        hub, start = self.server, 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers["Range"] or "")
        if asked:
            start = int(asked[1])
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", str(len(content) - start))
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if not body:
            return
        rest = content[start:]
        if hub.stop_after is not None and len(content) >= LARGE:
            self.wfile.write(rest[: hub.stop_after])
            self.wfile.flush()
            hub.sent += len(rest[: hub.stop_after])
            rest = rest[hub.stop_after :]
            hub.stopped.set()
            hub.go_on.wait(30)
        self.wfile.write(rest)
        hub.sent += len(rest)

    def _json(self, status: int, value: object, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, header in (headers or {}).items():
            self.send_header(name, header)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)


def _listing(repo: str, files: dict[str, bytes]) -> dict[str, object]:
    siblings = []
    for name, content in files.items():
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": _blob_id(content)}
        if len(content) >= LARGE:
            entry["lfs"] = {"sha256": _etag(content), "size": len(content), "pointerSize": 134}
        siblings.append(entry)
    return {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if len(content) >= LARGE else _blob_id(content)


@contextmanager
def local_hub() -> Iterator[LocalHub]:
    """Run a hub that serves until the context ends."""
    hub = LocalHub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
