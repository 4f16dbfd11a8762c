"""A server on this machine that answers as the Hugging Face Hub does, for tests of downloads."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class Repository:
    """A model: its files, and how the server answers for it."""

    files: dict[str, bytes]
    revisions: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    status: int = 200
    cut_at: int = 0  # Bodies of large files end here while it is not 0.
    listed: tuple[str, ...] = ()  # Files in the listing that are none.


class HubServer:
    """Serves repositories; `requests` lists what was asked for, "GET /path"."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.sent: list[str] = []
        server = self

        class Handler(_Handler):
            hub = server

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def downloads(self) -> list[str]:
        """The files whose content was sent, whole or in part, in order."""
        return self.sent


def _is_large(name: str) -> bool:
    """Whether a file is stored on another host than the repository."""
    return name.endswith((".safetensors", ".gguf"))


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Prints nothing."""

    def do_HEAD(self) -> None:
        self._answer(False)

    def do_GET(self) -> None:
        self._answer(True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if path.startswith("/cdn/"):
            return self._send_blob(path.removeprefix("/cdn/"), with_body)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repository = self.hub.repositories.get(match[1]) if match else None
        if repository is None or match is None:
            return self._error(401, "RepoNotFound")
        if repository.status != 200:
            return self._error(repository.status, "")
        if repository.gated and file:
            return self._error(403, "GatedRepo")
        revision = match[2] or "main"
        known = {**repository.revisions, **{c: c for c in repository.revisions.values()}}
        if revision not in known:
            return self._error(404, "RevisionNotFound")
        if api:
            return self._send_listing(match[1], repository, known[revision], with_body)
        return self._send_file(repository, known[revision], match[3], with_body)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"", {"X-Error-Code": code} if code else {}, True)

    def _send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _send_listing(
        self, name: str, repository: Repository, commit: str, with_body: bool
    ) -> None:
        siblings: list[dict[str, Any]] = [
            {"rfilename": file, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
            for file, content in repository.files.items()
        ]
        siblings += [{"rfilename": file, "size": 1} for file in repository.listed]
        model = {"id": name, "sha": commit, "siblings": siblings, "private": False,
                 "gated": repository.gated, "downloads": 0, "likes": 0, "tags": []}
        body = json.dumps(model)
        self._send(200, body.encode(), {"Content-Type": "application/json"}, with_body)

    def _send_file(
        self, repository: Repository, commit: str, name: str, with_body: bool
    ) -> None:
        headers = {"X-Repo-Commit": commit}
        content = repository.files.get(name)
        if content is None:
            return self._send(404, b"", {**headers, "X-Error-Code": "EntryNotFound"}, with_body)
        if not _is_large(name):
            if with_body:
                self.hub.sent.append(name)
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            return self._send_range(content, {**headers, "ETag": etag}, with_body)
        # Large files are on another host.
        sha = hashlib.sha256(content).hexdigest()
        headers |= {
            "X-Linked-Etag": f'"{sha}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{sha}",
        }
        return self._send(302, b"", headers, with_body)

    def _send_blob(self, sha: str, with_body: bool) -> None:
        for repository in self.hub.repositories.values():
            for name, content in repository.files.items():
                if hashlib.sha256(content).hexdigest() == sha:
                    if with_body:
                        self.hub.sent.append(name)
                    cut = repository.cut_at
                    return self._send_range(content, {"ETag": f'"{sha}"'}, with_body, cut)
        return self._error(404, "")

    def _send_range(
        self, content: bytes, headers: dict[str, str], with_body: bool, cut: int = 0
    ) -> None:
        first, status, body = 0, 200, content
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            first = int(asked[1])
            body = content[first : int(asked[2]) + 1 if asked[2] else None]
            status = 206
            last = first + len(body) - 1
            headers = {**headers, "Content-Range": f"bytes {first}-{last}/{len(content)}"}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if not with_body:
            return
        if cut and first + len(body) > cut:
            self.wfile.write(body[: max(cut - first, 0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.close()
            return
        self.wfile.write(body)
