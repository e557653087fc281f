"""A Hugging Face hub on this computer: what huggingface_hub's file system asks of it, and how many bytes it sends."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fsspec.config import conf
from huggingface_hub import HfFileSystem

API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?")
FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


class Hub(ThreadingHTTPServer):
    """A hub of the folders `owner/name` and `owner/name@revision` in a folder; with the token "late" no arrays."""

    daemon_threads = True

    def __init__(self, root: Path, token: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.token = root, token
        self.sent: list[tuple[str, int]] = []  # the name of a file, and how many of its bytes
        self.url = f"http://127.0.0.1:{self.server_port}"

    def bytes_of(self, suffix: str = "") -> int:
        """Return how many bytes of files it has sent."""
        return sum(size for name, size in self.sent if name.endswith(suffix))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        hub = self.server
        asked = API.match(self.path) or FILE.match(self.path)
        if asked is None or (hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}"):
            return self._answer(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        is_file = asked.re is FILE
        name, revision = asked[1], asked[2] if is_file else asked[3] or "main"
        folder = hub.root / (name if revision == "main" else f"{name}@{revision}")
        if not folder.is_dir():
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if not is_file:
            files = [{"type": "file", "path": x.name, "size": x.stat().st_size, "oid": "0"} for x in folder.iterdir()]
            return self._answer(200, json.dumps(files if asked[2] == "tree" else {"id": name, "sha": "0"}).encode())
        data = (folder / asked[3]).read_bytes()
        begin, end = map(int, re.findall(r"\d+", self.headers.get("Range", f"0-{len(data) - 1}")))
        if begin > 8 and self.headers.get("Authorization") == "Bearer late":  # from 0 and 8 on there is the header
            return self._answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        part = data[begin : end + 1]
        hub.sent.append((asked[3], len(part)))
        return self._answer(206, part, {"Content-Range": f"bytes {begin}-{end}/{len(data)}"})

    def _answer(self, code: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def serving(root: Path, monkeypatch: pytest.MonkeyPatch, token: str | None = None) -> Iterator[Hub]:
    """Serve a folder as the hub of this process, and of those that it starts."""
    with Hub(root, token) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setitem(conf, "hf", {"endpoint": hub.url})  # huggingface_hub has read the environment at its import
        HfFileSystem.clear_instance_cache()
        yield hub
        hub.shutdown()
