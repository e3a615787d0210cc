"""The HTTP process's handle on one engine process: its sockets, its events, and how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
import zmq

from loraplex.core.errors import EngineDeadError, LoraplexError
from loraplex.core.exits import describe_exit
from loraplex.core.logs import current_format, current_level
from loraplex.server.child_python import interrupts_blocked, same_python
from loraplex.server.engine_sockets import Context, Socket, new_socket
from loraplex.server.private_folder import PrivateFolder
from loraplex.server.protocol_ipc import (
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
    Remote,
    Shutdown,
    decode_event,
    encode,
    encode_extra,
    endpoint,
    has_message,
)

CHILD_MODULE: Final = "loraplex.server.engine_process"
_SEE_LOG: Final = "the log says why"
_LESS_MEMORY: Final = (
    "unless somebody killed it, memory ran out: lower --kv-memory, --host-adapter-memory or --replicas"
)
MAX_EVENTS_PER_WAKEUP: Final = 64
"""Number of events read at a time: a fast engine must not keep the event loop from the consumers."""


class EngineHandle(ABC):
    """One engine process from its start to its exit; a restarted engine is a new handle, with new sockets.

    `on_event` is called in the event loop for every event of the engine. `loaded` is done when the engine
    accepts adapters, and `ready` yields its Ready; both raise the reason if the start fails. Created and used
    in one event loop.
    """

    def __init__(self, on_event: Callable[[Event], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_event = on_event
        self._failure: ErrorInfo | None = None
        self._released = False
        self.loaded: asyncio.Future[None] = self._loop.create_future()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.exited = asyncio.Event()
        self.exit_reason = ""
        self.num_heard = 0
        """Number of events that the engine has sent, including heartbeats."""
        self._context: Context = zmq.Context()
        self._events: Socket | None = None
        self._commands: Socket | None = None

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The id of the engine process on its own machine; None while it is not known."""

    @property
    def node(self) -> str | None:
        """The address of its machine; None if it is this one."""
        return None

    @abstractmethod
    async def stop(self, *, grace_s: float) -> None:
        """Ask the process to exit, kill it after `grace_s` seconds, and release everything."""

    @abstractmethod
    def _connect_commands(self, address: str) -> Socket:
        """Connect to the address where the engine listens for commands."""

    @abstractmethod
    def _on_failure_reported(self) -> None:
        """Handle that the engine has failed and reported why; it need not wait any longer."""

    def _listen(self, events: Socket) -> None:
        """Read events from a socket that is bound."""
        self._events = events
        self._loop.add_reader(int(events.getsockopt(zmq.FD)), self._read_events)

    def send(self, command: Command) -> None:
        """Queue a command. It is lost if the process has ended, which `exited` reports."""
        if self._commands is not None:
            with contextlib.suppress(zmq.Again):
                self._commands.send(encode(command), zmq.NOBLOCK)

    @abstractmethod
    def kill(self, reason: str) -> None:
        """Kill the process; `exited` is set when it has ended. `reason` becomes part of `exit_reason`."""

    async def wait_exited(self, *, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.exited.wait()

    def _read_events(self) -> None:
        # The descriptor signals changes only: read until nothing is left, or schedule another read.
        for _ in range(MAX_EVENTS_PER_WAKEUP):
            if not self._read_event():
                return
        self._loop.call_soon(self._read_events)

    def _read_event(self) -> bool:
        """Read one event and act on it; return False if there is none."""
        if self._released or self._events is None or not has_message(self._events):
            return False
        event = decode_event(self._events.recv())
        self.num_heard += 1
        if type(event) is not Outputs:
            self._note(event)
        self._on_event(event)
        return True

    def _note(self, event: Event) -> None:
        """Handle the part of an event that concerns this handle."""
        match event:
            case Listening(address):
                self._commands = self._connect_commands(address)
                self.send(Hello())
            case Loaded():
                if not self.loaded.done():
                    self.loaded.set_result(None)
            case Ready():
                if not self.ready.done():
                    self.ready.set_result(event)
            case Failed(error):
                self._failure = error
                self._on_failure_reported()

    def _finish(
        self, exit_reason: str, error: LoraplexError | None = None, *, advice: str = _SEE_LOG
    ) -> None:
        """Handle the end of the process: read its last events, then report its exit. Waiters for the start
        get the engine's own error if it sent one, otherwise `error` or a message that ends in `advice`."""
        while self._read_event():
            pass
        self._release()
        self.exit_reason = self._failure.message if self._failure else exit_reason
        for awaited in (self.loaded, self.ready):
            if not awaited.done():
                if self._failure:
                    awaited.set_exception(self._failure.to_error())
                else:
                    reason = f"the engine process ended while starting: {self.exit_reason}; {advice}"
                    awaited.set_exception(error or EngineDeadError(reason))
                awaited.exception()  # mark it as retrieved: if the first fails, nobody awaits the second
        self.exited.set()

    def _release(self) -> None:
        if self._released:
            return
        self._released = True
        if self._events is not None:
            self._loop.remove_reader(int(self._events.getsockopt(zmq.FD)))
        self._context.destroy(linger=0)
        self._commands = None


class EngineChild(EngineHandle):
    """An engine process that this process has started on its own machine."""

    def __init__(
        self, *, factory: str, config: object, env: Mapping[str, str], on_event: Callable[[Event], None]
    ) -> None:
        super().__init__(on_event)
        self._directory = _private_directory()
        events = new_socket(self._context, zmq.PULL)
        events.bind(endpoint(self._directory.name, EVENTS_SOCKET))
        self._listen(events)
        launch = launch_of(factory, config, socket_dir=self._directory.name)
        try:
            # Not in a helper thread: Linux signals the child when the thread that spawned it ends.
            self._process = spawn(launch, env)
        except OSError as error:
            self._release()
            raise EngineDeadError(f"the engine process cannot be started: {error}") from error
        threading.Thread(target=self._wait_for_exit, name="engine-exit", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def stop(self, *, grace_s: float) -> None:
        try:
            if self.ready.done() and not self.ready.cancelled():
                self.send(Shutdown())
            else:  # it reads no commands while it loads
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
        self._failure = ErrorInfo(LoraplexError.__name__, reason)
        self._process.kill()

    def _connect_commands(self, address: str) -> Socket:
        commands = new_socket(self._context, zmq.PUSH)
        commands.connect(address)
        return commands

    def _on_failure_reported(self) -> None:
        self._end_stdin()

    def _wait_for_exit(self) -> None:
        exit_code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop was closed without `stop`
            self._loop.call_soon_threadsafe(self._ended, exit_code)

    def _ended(self, exit_code: int) -> None:
        was_killed = exit_code == -signal.SIGKILL
        self._finish(describe_exit(exit_code), advice=_LESS_MEMORY if was_killed else _SEE_LOG)
        self._end_stdin()

    def _end_stdin(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _release(self) -> None:
        super()._release()
        self._directory.cleanup()


def _private_directory() -> PrivateFolder:
    """Create a folder whose path is short enough for a socket name."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > zmq.IPC_PATH_MAX_LEN - 40:
        parent = "/tmp"
    return PrivateFolder(parent)


def launch_of(factory: str, config: object, *, socket_dir: str = "", remote: Remote | None = None) -> Launch:
    """Return the launch options of an engine process with this core, as a child of this process."""
    config_class = type(config)
    assert config_class.__module__ != "__main__", "the child cannot import a config class of a script"
    return Launch(
        factory=factory,
        config_type=f"{config_class.__module__}:{config_class.__qualname__}",
        config=msgspec.Raw(msgspec.json.encode(config, enc_hook=encode_extra)),
        socket_dir=socket_dir,
        remote=remote,
        parent_pid=os.getpid(),
        log_level=current_level(),
        log_format=current_format(),
    )


def spawn(launch: Launch, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start an engine process, which exits when the calling thread ends or its stdin is closed."""
    with interrupts_blocked():
        process = subprocess.Popen(
            [*same_python(), "-m", CHILD_MODULE],
            stdin=subprocess.PIPE,
            stdout=2,  # output of libraries belongs in the log, not in a command's output
            env={**os.environ, **env},
        )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has exited; its exit code says why
        process.stdin.write(msgspec.json.encode(launch) + b"\n")
        process.stdin.flush()
    return process
