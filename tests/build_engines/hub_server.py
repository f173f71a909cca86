"""A small hub: the endpoints that `huggingface_hub` asks for, over repositories that are folders of the test."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_test"


@dataclass
class Repository:
    """A repository: its commits by revision (branch, tag or the commit itself), and the folder of each commit."""

    commits: dict[str, str]
    folders: dict[str, Path]
    gated: bool = False


@dataclass
class Hub:
    """A running hub. asked: method and path of each request; cut: names of files that end half-way, once each.

    silent: repositories whose files are begun and never sent until `resumed`, and /tree/ for the lists of all; sent:
    contents that are sent in place of those of the files with these names; stated, hashes: sizes and hashes that are
    stated in place of theirs.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    resumed: threading.Event = field(default_factory=threading.Event)
    sent: dict[str, bytes] = field(default_factory=dict)
    stated: dict[str, int] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, folder: Path, revision: str = "main", gated: bool = False) -> str:
        """Publish `folder` as a revision of the repository `name`; returns the commit, a hash of what it holds."""
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        parts = [f"{path.relative_to(folder)}:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files]
        commit = hashlib.sha1("\n".join(parts).encode()).hexdigest()
        found = self.repositories.setdefault(name, Repository({}, {}, gated))
        found.commits |= {revision: commit, commit: commit}
        found.folders[commit] = folder
        return commit

    def downloaded(self) -> list[str]:
        """The files that were sent, by their names in the repository."""
        return [path.split("/resolve/")[1].split("/", 1)[1] for method, path in self.asked if _is_file(method, path)]


def _is_file(method: str, path: str) -> bool:
    return method == "GET" and "/resolve/" in path


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub on a free port of 127.0.0.1."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.resumed.set()
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append((self.command, path))
            parts = path.removeprefix("/api/models").strip("/").split("/")
            found = hub.repositories.get("/".join(parts[:2]))
            if found is None:
                self._fail(404, "RepoNotFound")
            elif found.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self._fail(403, "GatedRepo")
            elif (commit := found.commits.get(parts[3] if len(parts) > 3 else "main")) is None:
                self._fail(404, "RevisionNotFound")
            elif path.startswith("/api/models"):
                if "/tree/" in path and "/tree/" in hub.silent:
                    hub.resumed.wait()
                self._describe("/".join(parts[:2]), commit, found.folders[commit], parts[2:3] == ["tree"])
            else:
                if self.command == "GET" and "/".join(parts[:2]) in hub.silent:
                    hub.resumed.wait()
                self._send_file(commit, found.folders[commit], "/".join(parts[4:]))

        def _describe(self, name: str, commit: str, folder: Path, tree: bool) -> None:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            names = [path.relative_to(folder).as_posix() for path in files]
            if tree:
                entries = [
                    {
                        "type": "file",
                        "path": own,
                        "size": hub.stated.get(own, path.stat().st_size),
                        "oid": git_hash(path.read_bytes()),
                    }
                    for own, path in zip(names, files, strict=True)
                ]
                self._send(json.dumps(entries).encode())
            else:
                about = {"id": name, "sha": commit, "siblings": [{"rfilename": own} for own in names]}
                self._send(json.dumps(about).encode())

        def _send_file(self, commit: str, folder: Path, name: str) -> None:
            file = folder / name
            if not file.is_file():
                self._fail(404, "EntryNotFound")
                return
            content = hub.sent.get(name, file.read_bytes())
            etag = hub.hashes.get(name, git_hash(file.read_bytes()))
            start = 0
            if stated := self.headers.get("Range"):
                start = int(stated.removeprefix("bytes=").partition("-")[0])
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
            if name in hub.stated:
                headers["X-Linked-Size"] = str(hub.stated[name])
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._send(content[start:], 206 if start else 200, headers, cut=name)

        def _send(
            self, content: bytes, status: int = 200, headers: dict[str, str] | None = None, cut: str = ""
        ) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            if cut in hub.cut:
                self.wfile.write(content[: len(content) // 2])
                self.close_connection = True
                return
            self.wfile.write(content)

        def _fail(self, status: int, code: str) -> None:
            self._send(b"{}", status, {"X-Error-Code": code, "X-Error-Message": code})

    return Handler


def git_hash(content: bytes) -> str:
    """As Git names it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
