"""A Hugging Face hub on loopback, as far as the real client asks for it, and that client in a child process.

The client reads HF_ENDPOINT and HF_HOME when it is imported; hence the child, with an environment of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from loraplex.core import errors
from loraplex.core.hub import HubRepo

FETCH = """
import json, resource, sys
from loraplex.adapters.remote import resolve_adapter
from loraplex.core.errors import AdapterError
limit = int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    print(json.dumps({"folder": str(resolve_adapter(sys.argv[1]))}))
except AdapterError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
"""


@dataclass
class Commit:
    """The content of a repository at one time."""

    sha: str
    files: dict[str, bytes]


@dataclass
class Repo:
    """`branches` by name. `refusal` is (status, the hub's code for the reason) for everybody without token;
    one that is gated shows its listing nevertheless."""

    branches: dict[str, Commit]
    refusal: tuple[int, str] | None = None
    is_gated: bool = False

    def find(self, revision: str) -> Commit | None:
        by_sha = {commit.sha: commit for commit in self.branches.values()}
        return self.branches.get(revision) or by_sha.get(revision)


@dataclass
class FakeHub:
    """`fetched` has the (repository, file) of every file whose contents were asked for."""

    url: str
    home: Path
    repos: dict[str, Repo] = field(default_factory=dict)
    fetched: list[tuple[str, str]] = field(default_factory=list)

    def push(self, repo_id: str, files: dict[str, bytes] | Path, *, branch: str = "main") -> str:
        """A new commit of these files, or of those in a folder; returns its hash."""
        if isinstance(files, Path):
            files = {path.name: path.read_bytes() for path in files.iterdir()}
        sha = hashlib.sha1(json.dumps({n: d.hex() for n, d in files.items()}).encode()).hexdigest()
        repo = self.repos.setdefault(repo_id, Repo(branches={}))
        repo.branches[branch] = Commit(sha=sha, files=files)
        return sha

    def environment(self, **extra: str) -> dict[str, str]:
        """A process's environment in which this is the hub, with a cache of its own and no token."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        return kept | {"HF_ENDPOINT": self.url, "HF_HOME": str(self.home), "NO_PROXY": "127.0.0.1"} | extra

    def fetch(self, source: str, *, max_file_bytes: int = 0, cwd: Path | None = None, **extra: str) -> Any:
        """`resolve_adapter` in a child: {"folder"}, or {"error", "message"}."""
        command = [sys.executable, "-c", FETCH, source, str(max_file_bytes)]
        done = subprocess.run(
            command, env=self.environment(**extra), cwd=cwd, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def fetch_adapter(self, repo: HubRepo) -> Path:
        """Call the function of that name in a child."""
        answer = self.fetch(str(repo))
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["message"])
        return Path(answer["folder"])


@contextmanager
def fake_hub(home: Path) -> Iterator[FakeHub]:
    server = _Server(("127.0.0.1", 0), _Handler)
    hub = server.hub = FakeHub(url=f"http://127.0.0.1:{server.server_address[1]}", home=home)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, name="fake-hub")
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    hub: FakeHub


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        match parts:
            case ["api", "models", owner, name, "revision" | "tree" as what, *revision]:
                self._find(f"{owner}/{name}", "/".join(revision), what)
            case [owner, name, "resolve", revision, *path]:
                self._find(f"{owner}/{name}", revision, "/".join(path), is_file=True)
            case _:
                self._send(404, b"")

    def _find(self, repo_id: str, revision: str, what: str, *, is_file: bool = False) -> None:
        repo = self.server.hub.repos.get(repo_id)
        has_token = "authorization" in self.headers
        if repo is None:
            self._refuse(404 if has_token else 401, "RepoNotFound")
        elif repo.refusal is not None and not has_token and (is_file or not repo.is_gated):
            self._refuse(*repo.refusal)
        elif (commit := repo.find(revision)) is None:
            self._refuse(404, "RevisionNotFound")
        elif is_file:
            self._send_file(repo_id, commit, what)
        else:
            self._send_listing(repo_id, commit, what)

    def _send_listing(self, repo_id: str, commit: Commit, what: str) -> None:
        listing: Any = {
            "id": repo_id,
            "sha": commit.sha,
            "siblings": [{"rfilename": name} for name in commit.files],
        }
        if what == "tree":
            listing = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in commit.files.items()
            ]
        self._send(200, json.dumps(listing).encode(), {"content-type": "application/json"})

    def _send_file(self, repo_id: str, commit: Commit, name: str) -> None:
        data = commit.files.get(name)
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        if self.command == "GET":
            self.server.hub.fetched.append((repo_id, name))
        self._send(200, data, {"etag": f'"{_etag(data)}"', "x-repo-commit": commit.sha})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"x-error-code": code} if code else {})

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
