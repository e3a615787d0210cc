"""The parent's end of one CPU LoRA worker."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from loraplex.engine.assist.messages import Launch, Message, Weights, receive_ready, send
from loraplex.engine.assist.shared_block import SharedBlock

_WORKER_MODULE: Final = "loraplex.engine.assist.worker"


class WorkerProcess:
    """A started process. It is killed when the thread that started it ends, or before that by `kill`."""

    def __init__(self, launch: Callable[[int], Launch]) -> None:
        """Start the process. `launch`: returns the command line, given a socket's descriptor. Raises OSError
        if it cannot be started."""
        self.started_at = time.monotonic()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        self._sentinel: int | None = None
        try:
            with theirs:
                self._process = _spawn(launch(theirs.fileno()))
        except BaseException:
            self.channel.close()
            raise
        try:
            self._sentinel = os.pidfd_open(self._process.pid)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the process ends."""
        assert self._sentinel is not None
        return self._sentinel

    def poll(self) -> int | None:
        """Return its exit code, once it has ended."""
        return self._process.poll()

    def send_weights(self, index: int, block: SharedBlock) -> None:
        self.send(Weights(index, block.fd, block.num_bytes))

    def send(self, message: Message) -> None:
        """Send a message; kill the process if it cannot be sent, for example because it does not read."""
        try:
            send(self.channel, message)
        except OSError:
            self._process.kill()

    def receive_ready(self) -> dict[int, float] | None:
        """Return the times that it measured; None until it has sent them."""
        try:
            return receive_ready(self.channel)
        except OSError:
            return None

    def kill(self) -> int:
        """Kill the process, wait until it is gone and can write nowhere, and return its exit code.
        Idempotent."""
        self._process.kill()
        self.wait(None)
        return self._process.wait()

    def wait(self, timeout_s: float | None) -> bool:
        """Close its socket, whereupon it ends by itself, and wait for that; return whether it has ended."""
        self.channel.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        if self._sentinel is not None:
            os.close(self._sentinel)
            self._sentinel = None
        return True


def _spawn(launch: Launch) -> subprocess.Popen[bytes]:
    # It imports from the current folder only if we do: a stray torch.py there must not shadow ours.
    sees_cwd = "" in sys.path or os.getcwd() in sys.path
    python = [sys.executable] if sees_cwd else [sys.executable, "-P"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [*python, "-m", _WORKER_MODULE, launch.to_json()],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=launch.fds,
        env=env,
    )
