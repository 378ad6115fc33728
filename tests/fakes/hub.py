"""Model hub on a real socket: the part of the Hugging Face API for snapshot downloads."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """Server of one model.

    Downloads of files longer than `cut_at` break off at that offset. `contents` replaces the sent bytes of a file; its
    checksum stays.
    """

    model: str
    files: Mapping[str, bytes]
    url: str = ""
    contents: Mapping[str, bytes] = field(default_factory=dict)
    # Checksums in the file list that replace those of the files.
    checksums: Mapping[str, str] = field(default_factory=dict)
    # Bytes sent instead of the file list.
    listing: bytes = b""
    cut_at: int | None = None
    # File and `Range` header of every download with such a header.
    ranges: list[tuple[str, str]] = field(default_factory=list)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors, because a killed client resets its connections."""


@contextmanager
def running_hub(model: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    hub = Hub(model, files)
    server = _Server(("127.0.0.1", 0), _handler_of(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler_of(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            about, download = f"/api/models/{hub.model}", f"/{hub.model}/resolve/{COMMIT}/"
            if path in (about, f"{about}/revision/main"):
                self.answer_text(json.dumps({"id": hub.model, "sha": COMMIT, "siblings": []}).encode())
            elif path == f"{about}/tree/{COMMIT}":
                listed = [_entry(name, content, hub.checksums.get(name)) for name, content in hub.files.items()]
                self.answer_text(hub.listing or json.dumps(listed).encode())
            elif path.startswith(download) and (name := path.removeprefix(download)) in hub.files:
                self.answer_file(name, hub.files[name])
            else:
                known = path.startswith(about)
                self.refuse("RevisionNotFound" if known else "RepoNotFound")

        def answer_text(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def refuse(self, code: str) -> None:
            self.send_response(404)
            self.send_header("x-error-code", code)
            self.send_header("content-length", "0")
            self.end_headers()

        def answer_file(self, name: str, content: bytes) -> None:
            start = 0
            if range_header := self.headers.get("range"):
                hub.ranges.append((name, range_header))
                start = int(range_header.removeprefix("bytes=").partition("-")[0])
            part = hub.contents.get(name, content)[start:]
            self.send_response(206 if start else 200)
            if start:
                self.send_header("content-range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.send_header("etag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("x-repo-commit", COMMIT)
            self.send_header("accept-ranges", "bytes")
            self.send_header("content-length", str(len(part)))
            self.end_headers()
            if self.command == "HEAD":
                return
            if hub.cut_at is None or len(content) <= hub.cut_at:
                self.wfile.write(part)
                return
            self.wfile.write(part[: hub.cut_at - start])
            self.wfile.flush()
            self.close_connection = True

    return Handler


def _entry(name: str, content: bytes, checksum: str | None) -> dict[str, object]:
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"oid": checksum or digest, "size": len(content), "pointerSize": 134}
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": digest[:40]}
    return entry | ({"lfs": lfs} if name.endswith(".safetensors") else {})
