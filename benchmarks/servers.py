"""A server under test as a subprocess: started, polled until healthy, and always killed with its children."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

_POLL_S = 0.1
_LOG_TAIL_LINES = 30


class ServerFailedError(Exception):
    """The server did not become healthy; the message holds the end of its log."""


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """The command that starts a server. `{port}` in an argument is replaced by the port."""

    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    health_path: str = "/health"


@dataclass(frozen=True, kw_only=True)
class RunningServer:
    base_url: str
    start_s: float
    log_path: Path
    pid: int


@contextmanager
def running(command: ServerCommand, *, log_path: Path, timeout_s: float = 600.0) -> Iterator[RunningServer]:
    """Run the server, and yield it once it is healthy. Its whole process group is always ended afterwards."""
    port = free_port()
    args = [arg.replace("{port}", str(port)) for arg in command.args]
    if shutil.which(args[0]) is None:
        raise ServerFailedError(f"no such program: {args[0]}")
    started_s = time.perf_counter()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            args,
            env={**os.environ, **command.env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its own process group, which is killed at the end
        )
    try:
        base_url = f"http://127.0.0.1:{port}"
        _wait_healthy(process, base_url + command.health_path, log_path, timeout_s)
        yield RunningServer(
            base_url=base_url,
            start_s=time.perf_counter() - started_s,
            log_path=log_path,
            pid=process.pid,
        )
    finally:
        _end_group(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log_path: Path, timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise ServerFailedError(f"the server ended with code {process.returncode}\n{_tail(log_path)}")
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not listening yet, or listening and not ready (503)
        time.sleep(_POLL_S)
    raise ServerFailedError(f"the server was not healthy after {timeout_s:g} s\n{_tail(log_path)}")


def _end_group(process: subprocess.Popen[bytes], grace_s: float = 15.0) -> None:
    _signal_group(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=grace_s)
    # Workers can outlive their parent: the group is killed in any case, and waited for, since the next
    # engine must not start before this one has freed its memory.
    deadline_s = time.monotonic() + grace_s
    while _signal_group(process.pid, signal.SIGKILL) and time.monotonic() < deadline_s:
        process.poll()
        time.sleep(_POLL_S)


def _signal_group(group_id: int, number: signal.Signals) -> bool:
    """Send a signal, and return whether the group still had any process."""
    try:
        os.killpg(group_id, number)
    except ProcessLookupError:
        return False
    return True


def _tail(log_path: Path) -> str:
    lines = log_path.read_text(errors="replace").splitlines()
    return "\n".join(lines[-_LOG_TAIL_LINES:])
