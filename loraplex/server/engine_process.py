"""The engine process: builds a core and drives it on the commands of the HTTP process that started it.

Run as `python -m loraplex.server.engine_process` with a `Launch` as one JSON line on stdin. The parent keeps
stdin open while it lives; when stdin ends, the child exits.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import logging
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any, Final, NamedTuple

import msgspec
import zmq

from loraplex.core.engine_policy import EnginePolicy
from loraplex.core.errors import LoraplexError
from loraplex.core.logs import flush_logs, logging_to_stderr
from loraplex.core.request import EngineOutput
from loraplex.engine.interface import EngineCore
from loraplex.engine.options import EngineOptions
from loraplex.server.child_python import ignore_interrupts
from loraplex.server.engine_sockets import CurveKeys, bind_commands, calling_when_cut, connect_events
from loraplex.server.heartbeat import Heartbeat
from loraplex.server.pool.replica_pool import ReplicaPool
from loraplex.server.protocol_ipc import (
    AdapterAdded,
    AdapterRemoved,
    AddAdapter,
    AddRequest,
    Cancel,
    Command,
    ErrorInfo,
    Event,
    Failed,
    GetStats,
    Hello,
    JoinPool,
    Launch,
    Listening,
    Loaded,
    Outputs,
    PoolJoined,
    Prepare,
    Ready,
    Rejected,
    RemoveAdapter,
    SetTenants,
    Shutdown,
    StartProgress,
    Stats,
    decode_command,
    decode_extra,
    encode,
    has_message,
)

logger = logging.getLogger(__name__)

EXIT_FAILED: Final = 1
EXIT_PARENT_GONE: Final = 3
LAST_WORDS_S: Final = 3.0
"""Seconds that a failed child waits for its report to be read: the parent closes stdin once it has read
it."""

_IDLE_MS: Final = 1000
"""Milliseconds that an idle engine waits before it checks that all its processes still run."""
_COMMANDS_A_STEP: Final = 128
_PR_SET_PDEATHSIG: Final = 1
_MAX_REASON_CHARS: Final = 500
_LOOPBACK: Final = "127.0.0.1"


class EngineLoop:
    """Receives commands, runs steps and sends events, in a single thread."""

    def __init__(
        self,
        core: EngineCore,
        commands: zmq.Socket[bytes],
        events: zmq.Socket[bytes],
        pool: ReplicaPool,
        host: str = _LOOPBACK,
    ) -> None:
        """`pool`: where the core looks for adapters before it reads their files. `host`: this machine's
        address for other replicas."""
        self._core = core
        self._commands = commands
        self._events = events
        self._pool = pool
        self._host = host
        self._queued: list[EngineOutput] = []
        self._may_prepare = False

    def start(self) -> bool:
        """Accept adapters until Prepare, then prepare for requests on them; return False after Shutdown."""
        while not self._may_prepare:
            if not self._receive(wait=True):
                return False
        core = self._core
        most = core.num_required
        while (left := core.num_required) > 0:
            most = max(most, left)
            self._send(StartProgress("capturing graphs", 1.0 - left / most))
            core.prepare()
            if not self._receive(wait=False):
                return False
        return True

    def run(self) -> None:
        """Serve until Shutdown. Any exception of a step is a bug and propagates to the caller."""
        core = self._core
        while self._receive(wait=not core.has_work() and not core.prepare()):
            if core.has_work():
                self._step()
            self._report_removals()

    def _step(self) -> None:
        outputs = self._core.step()
        if outputs:
            self._send(Outputs(list(outputs)))

    def _receive(self, *, wait: bool) -> bool:
        """Handle up to a fixed number of pending commands; return False after Shutdown. With `wait`, wait a
        while for the first.

        The rest are handled after the next step: a burst of requests must not delay those that run.
        """
        if wait:
            self._commands.poll(_IDLE_MS)
        for _ in range(_COMMANDS_A_STEP):
            if not has_message(self._commands):
                break
            command = decode_command(self._commands.recv())
            if isinstance(command, Shutdown):
                return False
            self._handle(command)
        if self._queued:
            self._send(Outputs(self._queued))
            self._queued = []
        self._report_removals()
        return True

    def _report_removals(self) -> None:
        """Report completed removals. Also called without a step: cancelling an adapter's last request
        completes its removal."""
        for version in self._core.take_removed_adapters():
            self._send(AdapterRemoved(version))

    def _handle(self, command: Command) -> None:
        core = self._core
        match command:
            case AddRequest(request, holders):
                if request.adapter is not None:
                    self._pool.locate(request.adapter, holders)
                try:
                    core.add_request(request)
                except LoraplexError as error:
                    self._send(Rejected(request.request_id, ErrorInfo.of(error)))
                else:
                    # What structured output asks for may still be refused, once it is compiled.
                    if request.params.structured_output is None:
                        self._queued.append(EngineOutput(request_id=request.request_id))
            case Cancel(request_id):
                core.cancel(request_id)
            case AddAdapter(spec, holders):
                self._pool.locate(spec.version, holders)
                try:
                    core.add_adapter(spec)
                except LoraplexError as error:
                    self._send(AdapterAdded(spec.version, ErrorInfo.of(error)))
                else:
                    self._send(AdapterAdded(spec.version))
                    if not self._may_prepare:
                        core.stage_adapter(spec.version)
            case JoinPool(public, secret):
                self._join_pool(CurveKeys(public=public, secret=secret))
            case Prepare():
                self._may_prepare = True
            case RemoveAdapter(version):
                try:
                    core.remove_adapter(version)
                except LoraplexError as error:
                    self._send(AdapterRemoved(version, ErrorInfo.of(error)))
            case SetTenants(policies):
                core.set_tenants(policies)
            case GetStats():
                self._send(Stats(core.stats()))

    def _join_pool(self, keys: CurveKeys) -> None:
        try:
            address = self._pool.join(keys, self._host)
        except zmq.ZMQError as error:
            logger.warning(
                "adapters are read from files, not copied from other replicas: nothing can listen at %s (%s)",
                self._host,
                error,
            )
        else:
            self._send(PoolJoined(address))

    def _send(self, event: Event) -> None:
        self._events.send(encode(event))


def import_object(path: str) -> Any:
    """Return the object that "package.module:name" names."""
    module_name, _, qualified_name = path.partition(":")
    found: Any = importlib.import_module(module_name)
    for name in qualified_name.split("."):
        found = getattr(found, name)
    return found


class Built(NamedTuple):
    """A core, and what `Ready` reports of it if it is our engine."""

    core: EngineCore
    costs: str | None = None
    policy: EnginePolicy | None = None


def build_core(launch: Launch, events: zmq.Socket[bytes], pool: ReplicaPool) -> Built:
    """Return the core and its costs. A factory with a parameter `progress` gets a function of (phase,
    fraction), one with `peers` gets the pool."""
    factory = import_object(launch.factory)
    config = msgspec.json.decode(
        launch.config, type=import_object(launch.config_type), dec_hook=decode_extra, strict=True
    )

    def report(phase: str, fraction: float | None = None) -> None:
        events.send(encode(StartProgress(phase, fraction)))

    taken = inspect.signature(factory).parameters
    extra = {name: each for name, each in {"progress": report, "peers": pool}.items() if name in taken}
    core: EngineCore = factory(config, **extra)
    if not isinstance(config, EngineOptions):
        return Built(core)
    # Imported here: with numpy and the cost models it takes as long as all other imports of this process,
    # which precede Listening. The factory of a real engine has imported them by now.
    from loraplex.server.engine_costs import costs_of, policy_of

    return Built(core, costs_of(config, core), policy_of(config, core))


def leave_with_parent(parent_pid: int) -> None:
    """End this process when its parent ends, however that happens.

    Linux's signal needs no cooperation of this process, so it works deep inside a native call. The end of
    stdin is used on other systems, and by a living parent to end a child that is still loading.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the signal was requested
        os._exit(EXIT_PARENT_GONE)
    threading.Thread(target=_wait_for_end_of_stdin, name="parent-watch", daemon=True).start()


def _wait_for_end_of_stdin() -> None:
    # os.read instead of sys.stdin: this thread would hold the lock of sys.stdin when the interpreter exits.
    while os.read(0, 1024):
        pass
    _leave()


def _leave() -> None:
    os._exit(EXIT_PARENT_GONE)


def describe(error: BaseException) -> str:
    """Return one line about an exception that is not a LoraplexError."""
    first_line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first_line}"[:_MAX_REASON_CHARS].removesuffix(": ")


def serve(launch: Launch, context: zmq.Context[zmq.Socket[bytes]]) -> int:
    """Build the core and run it to its end; return the exit code of the process."""
    events = connect_events(context, launch)
    # A process that was not started by the HTTP process must detect by itself that the HTTP process is gone.
    watching = calling_when_cut(events, _leave) if launch.remote is not None else nullcontext()
    with watching:
        return _serve(launch, context, events)


def _serve(launch: Launch, context: zmq.Context[zmq.Socket[bytes]], events: zmq.Socket[bytes]) -> int:
    commands, address = bind_commands(context, launch)
    events.send(encode(Listening(address)))
    hello = decode_command(commands.recv())
    assert isinstance(hello, Hello)
    if launch.socket_dir:
        shutil.rmtree(launch.socket_dir, ignore_errors=True)
    started_s = time.monotonic()
    pool = ReplicaPool()
    try:
        built = build_core(launch, events, pool)
        core = built.core
        host = _LOOPBACK if launch.remote is None else launch.remote.host
        loop = EngineLoop(core, commands, events, pool, host)
        events.send(encode(Loaded()))
        is_ready = loop.start()
    except LoraplexError as error:
        return _report_failure(events, ErrorInfo.of(error))
    except Exception as error:
        logger.exception("the engine could not start")
        reason = f"the engine could not start: {describe(error)}"
        return _report_failure(events, ErrorInfo(LoraplexError.__name__, reason))
    ready = Ready(
        num_kv_blocks=core.stats().num_kv_blocks,
        max_model_len=core.max_model_len,
        load_s=time.monotonic() - started_s,
        costs=built.costs,
        policy=built.policy,
    )
    try:
        if is_ready:
            gc.collect()
            gc.freeze()  # keep full collections, which delay a step, from traversing all objects made so far
            events.send(encode(ready))
            loop.run()
    except Exception as error:
        logger.exception("the engine failed")
        return _report_failure(events, ErrorInfo(LoraplexError.__name__, describe(error)))
    pool.close()
    core.close()
    return 0


def _report_failure(events: zmq.Socket[bytes], error: ErrorInfo) -> int:
    """Report the error and stay until it was read: data still in flight at exit would race with the exit."""
    flush_logs()  # the parent ends this process as soon as it has read the event
    events.send(encode(Failed(error)))
    time.sleep(LAST_WORDS_S)
    return EXIT_FAILED


def main() -> int:
    # Ctrl-C reaches every process of the terminal: the parent decides, and drains its requests first.
    ignore_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    leave_with_parent(launch.parent_pid)
    with logging_to_stderr(launch.log_level, launch.log_format, "engine"):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            with Heartbeat(connect_events(context, launch)):
                return serve(launch, context)
        finally:
            context.destroy(linger=1000)


if __name__ == "__main__":
    sys.exit(main())
