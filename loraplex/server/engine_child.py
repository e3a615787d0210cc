"""The parent's handle on one engine process: its sockets, what it says, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import zmq

from loraplex.core.errors import EngineDeadError, LoraplexError
from loraplex.core.exits import describe_exit
from loraplex.core.logs import current_format, current_level
from loraplex.server.protocol_ipc import (
    COMMANDS_SOCKET,
    EVENTS_SOCKET,
    Command,
    ErrorInfo,
    Event,
    Failed,
    Hello,
    Launch,
    Listening,
    Loaded,
    Outputs,
    Ready,
    Shutdown,
    decode_event,
    encode,
    encode_extra,
    endpoint,
    has_message,
)

CHILD_MODULE: Final = "loraplex.server.engine_process"
MAX_EVENTS_PER_WAKEUP: Final = 64
"""An engine faster than its readers must not keep the event loop from them."""


class EngineChild:
    """One engine process from spawn to exit; a restarted engine is a new one, with new sockets.

    `on_event` is called in the event loop for everything the child says. `loaded` is done when the child
    takes adapters, `ready` yields its Ready; both raise the reason if it comes to nothing. Made and used in
    one event loop.
    """

    def __init__(
        self, *, factory: str, config: object, env: Mapping[str, str], on_event: Callable[[Event], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._failure: ErrorInfo | None = None
        self._released = False
        self.loaded: asyncio.Future[None] = self._loop.create_future()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.exited = asyncio.Event()
        self.exit_reason = ""
        self.num_heard = 0
        """Events that the child has sent, signs of life among them."""

        self._directory = _private_directory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._events = self._context.socket(zmq.PULL)
        self._events.set_hwm(0)
        self._events.bind(endpoint(self._directory.name, EVENTS_SOCKET))
        self._events_fd = int(self._events.getsockopt(zmq.FD))
        self._commands: zmq.Socket[bytes] | None = None
        self._loop.add_reader(self._events_fd, self._read_events)
        try:
            # Not in a helper thread: Linux signals the child when the thread that spawned it ends.
            self._process = _spawn(_launch_line(factory, config, self._directory.name), env)
        except OSError as error:
            self._release()
            raise EngineDeadError(f"the engine process cannot be started: {error}") from error
        threading.Thread(target=self._wait_for_exit, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Queue a command. Lost if the process has ended, which `exited` tells."""
        if self._commands is not None:
            with contextlib.suppress(zmq.Again):
                self._commands.send(encode(command), zmq.NOBLOCK)

    async def stop(self, *, grace_s: float) -> None:
        """Ask the process to leave, kill it after `grace_s`, and release everything."""
        try:
            if self.ready.done() and not self.ready.cancelled():
                self.send(Shutdown())
            else:  # it hears no command while it loads
                self._end_stdin()
            await self.wait_exited(timeout_s=grace_s)
            if not self.exited.is_set():
                self._process.kill()
                await self.wait_exited(timeout_s=grace_s)
        finally:
            if not self.exited.is_set():
                self._process.kill()
                self._end_stdin()
                self._release()

    def kill(self, reason: str) -> None:
        """End the process at once; `exited` tells when it has. `reason`: for `exit_reason`."""
        self._failure = ErrorInfo(LoraplexError.__name__, reason)
        self._process.kill()

    async def wait_exited(self, *, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.exited.wait()

    def _read_events(self) -> None:
        # The descriptor only signals changes: read until nothing is left, or come back without its signal.
        for _ in range(MAX_EVENTS_PER_WAKEUP):
            if not self._read_event():
                return
        self._loop.call_soon(self._read_events)

    def _read_event(self) -> bool:
        """Read one event and act on it; False when there is none."""
        if self._released or not has_message(self._events):
            return False
        event = decode_event(self._events.recv())
        self.num_heard += 1
        if type(event) is not Outputs:
            self._note(event)
        self._on_event(event)
        return True

    def _note(self, event: Event) -> None:
        """What this handle itself needs of an event."""
        match event:
            case Listening():
                self._commands = self._context.socket(zmq.PUSH)
                self._commands.set_hwm(0)
                self._commands.connect(endpoint(self._directory.name, COMMANDS_SOCKET))
                self.send(Hello())
            case Loaded():
                if not self.loaded.done():
                    self.loaded.set_result(None)
            case Ready():
                if not self.ready.done():
                    self.ready.set_result(event)
            case Failed(error):
                self._failure = error
                self._end_stdin()

    def _wait_for_exit(self) -> None:
        exit_code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed without `stop`
            self._loop.call_soon_threadsafe(self._finish, exit_code)

    def _finish(self, exit_code: int) -> None:
        while self._read_event():
            pass
        self._end_stdin()
        self._release()
        self.exit_reason = self._failure.message if self._failure else describe_exit(exit_code)
        for awaited in (self.loaded, self.ready):
            if not awaited.done():
                if self._failure:
                    awaited.set_exception(self._failure.to_error())
                else:
                    reason = f"the engine process ended while starting: {self.exit_reason}"
                    awaited.set_exception(EngineDeadError(reason))
                awaited.exception()  # nobody waits for the second one if the first has failed
        self.exited.set()

    def _end_stdin(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        self._loop.remove_reader(self._events_fd)
        self._context.destroy(linger=0)
        self._commands = None
        self._directory.cleanup()


def _private_directory() -> tempfile.TemporaryDirectory[str]:
    """A folder of mode 0700 whose path is short enough for a socket name."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > zmq.IPC_PATH_MAX_LEN - 40:
        parent = "/tmp"
    return tempfile.TemporaryDirectory(prefix="loraplex-", dir=parent, ignore_cleanup_errors=True)


def _launch_line(factory: str, config: object, socket_dir: str) -> bytes:
    config_class = type(config)
    assert config_class.__module__ != "__main__", "the child cannot import a config class of a script"
    launch = Launch(
        factory=factory,
        config_type=f"{config_class.__module__}:{config_class.__qualname__}",
        config=msgspec.Raw(msgspec.json.encode(config, enc_hook=encode_extra)),
        socket_dir=socket_dir,
        parent_pid=os.getpid(),
        log_level=current_level(),
        log_format=current_format(),
    )
    return msgspec.json.encode(launch) + b"\n"


def _spawn(launch_line: bytes, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    # The child looks into the current folder only if we do: a stray torch.py there must not shadow ours.
    sees_cwd = "" in sys.path or os.getcwd() in sys.path
    python = [sys.executable] if sees_cwd else [sys.executable, "-P"]
    process = subprocess.Popen(
        [*python, "-m", CHILD_MODULE],
        stdin=subprocess.PIPE,
        stdout=2,  # whatever a library prints belongs into the log, not into a command's output
        env={**os.environ, **env},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended already; its exit code will say why
        process.stdin.write(launch_line)
        process.stdin.flush()
    return process
