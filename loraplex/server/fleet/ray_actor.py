"""A replica's place on a Ray cluster: an actor that reserves its GPUs or cores, and starts its engine
process.

Tokens do not pass through it: the engine process connects to the front directly, and ends with this process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

import msgspec
import ray

import loraplex
from loraplex.core.exits import describe_exit
from loraplex.server.engine_child import spawn
from loraplex.server.engine_sockets import CurveKeys
from loraplex.server.protocol_ipc import Launch


class EngineActor:
    """Turned into an actor by the driver. Its methods run one after the other in the main thread, so that the
    engine process, which Linux ends with the thread that started it, lives as long as the actor."""

    def __init__(self) -> None:
        self._host = str(ray.util.get_node_ip_address())
        self._keys = CurveKeys.make()
        self._process: subprocess.Popen[bytes] | None = None

    def about(self) -> tuple[str, str, str]:
        """Return the node's address, the version of loraplex there, and the public key of the engine."""
        return self._host, loraplex.__version__, self._keys.public

    def run(self, launch_json: str) -> int:
        """Start the engine process; return its id."""
        launch = msgspec.json.decode(launch_json, type=Launch)
        assert launch.remote is not None
        remote = msgspec.structs.replace(
            launch.remote, host=self._host, public_key=self._keys.public, secret_key=self._keys.secret
        )
        # Not the front's environment: paths, devices and caches are those of this node.
        self._process = spawn(msgspec.structs.replace(launch, remote=remote, parent_pid=os.getpid()), env={})
        return self._process.pid

    def wait(self) -> str:
        """Wait until the engine process has exited; return how it ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        exit_code = self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        return describe_exit(exit_code)
