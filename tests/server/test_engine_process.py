from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import fake_core
import msgspec
import pytest
import zmq
from fake_core import CHILD_ENV, FakeCore, FakeOptions, request_of, spec_of, tokens_of

from loraplex.core.request import EngineOutput
from loraplex.server import protocol_ipc as ipc
from loraplex.server.engine_child import spawn
from loraplex.server.engine_process import (
    _COMMANDS_A_STEP,
    EXIT_PARENT_GONE,
    EngineLoop,
    describe,
    import_object,
)
from loraplex.server.engine_sockets import CurveKeys
from loraplex.server.pool.replica_pool import ReplicaPool

WAIT_S = 60.0


class RawChild:
    """An engine process driven by hand, without the client."""

    def __init__(self, socket_dir: Path, options: FakeOptions, *, factory: str, parent_pid: int) -> None:
        self.socket_dir = socket_dir
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.events = self.context.socket(zmq.PULL)
        self.events.bind(ipc.endpoint(str(socket_dir), ipc.EVENTS_SOCKET))
        self.commands = self.context.socket(zmq.PUSH)
        launch = ipc.Launch(
            factory=factory,
            config_type="fake_core:FakeOptions",
            config=msgspec.Raw(msgspec.json.encode(options, enc_hook=ipc.encode_extra)),
            socket_dir=str(socket_dir),
            parent_pid=parent_pid,
            log_level=30,
        )
        self.process = spawn(launch, CHILD_ENV)

    def receive(self) -> ipc.Event:
        heard = self.events.poll(int(WAIT_S * 1000))
        assert heard, f"the child says nothing; its exit code is {self.process.poll()}"
        event = ipc.decode_event(self.events.recv())
        return self.receive() if isinstance(event, ipc.Alive) else event

    def greet(self) -> None:
        assert isinstance(self.receive(), ipc.Listening)
        self.commands.connect(ipc.endpoint(str(self.socket_dir), ipc.COMMANDS_SOCKET))
        self.send(ipc.Hello())

    def wait_ready(self) -> ipc.Ready:
        assert isinstance(self.receive(), ipc.Loaded)
        self.send(ipc.Prepare())
        ready = self.receive()
        assert isinstance(ready, ipc.Ready)
        return ready

    def send(self, command: ipc.Command) -> None:
        self.commands.send(ipc.encode(command))

    def end_stdin(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def destroy(self) -> None:
        self.process.kill()
        self.end_stdin()
        self.process.wait()
        self.context.destroy(linger=0)


@contextmanager
def raw_child(
    options: FakeOptions | None = None,
    *,
    factory: str = fake_core.FACTORY,
    parent_pid: int | None = None,
    is_interrupted: bool = False,
) -> Iterator[RawChild]:
    """`is_interrupted`: a Ctrl-C reaches it at once."""
    socket_dir = Path(tempfile.mkdtemp())
    child = RawChild(
        socket_dir, options or FakeOptions(), factory=factory, parent_pid=parent_pid or os.getpid()
    )
    if is_interrupted:
        child.process.send_signal(signal.SIGINT)
    try:
        if parent_pid is None:
            child.greet()
        yield child
    finally:
        child.destroy()
        shutil.rmtree(socket_dir, ignore_errors=True)


def test_a_child_serves_and_leaves_with_zero() -> None:
    with raw_child() as child:
        ready = child.wait_ready()
        assert (ready.num_kv_blocks, ready.max_model_len) == (77, 512)
        assert not child.socket_dir.exists()
        request = request_of("a", max_tokens=2)
        child.send(ipc.AddRequest(request))
        queued = child.receive()
        assert queued == ipc.Outputs([EngineOutput(request_id="a")])
        tokens: list[int] = []
        for _ in range(2):
            event = child.receive()
            assert isinstance(event, ipc.Outputs)
            tokens += event.outputs[0].token_ids
        assert tuple(tokens) == tokens_of(request)
        child.send(ipc.Shutdown())
        assert child.process.wait(WAIT_S) == 0


def test_a_factory_may_do_without_progress() -> None:
    with raw_child(factory="fake_core:build_without_progress") as child:
        assert child.wait_ready().num_kv_blocks == 77


def test_progress_is_told_before_ready() -> None:
    with raw_child(FakeOptions(phases=("weights", "warm-up"))) as child:
        assert child.receive() == ipc.StartProgress("weights", 0.5)
        assert child.receive() == ipc.StartProgress("warm-up", 0.5)
        child.wait_ready()


def test_ready_is_said_when_all_is_prepared_for_the_adapters_known(tmp_path: Path) -> None:
    gates = [tmp_path / "first", tmp_path / "second"]
    for gate in gates:
        gate.touch()
    with raw_child(FakeOptions(preparations=tuple(gates))) as child:
        assert isinstance(child.receive(), ipc.Loaded)
        child.send(ipc.AddAdapter(spec_of("v1")))
        assert child.receive() == ipc.AdapterAdded("v1")
        child.send(ipc.Prepare())
        assert child.receive() == ipc.StartProgress("capturing graphs", 0.0)
        gates[0].unlink()
        assert child.receive() == ipc.StartProgress("capturing graphs", 0.5)
        gates[1].unlink()
        assert isinstance(child.receive(), ipc.Ready)


def test_a_failed_start_is_told_with_its_class() -> None:
    with raw_child(FakeOptions(start_fault="model")) as child:
        event = child.receive()
        assert event == ipc.Failed(ipc.ErrorInfo("ModelError", "this model has no layers"))
        child.end_stdin()
        assert child.process.wait(WAIT_S) != 0


def test_a_step_that_raises_is_told_and_ends_the_process() -> None:
    with raw_child() as child:
        child.wait_ready()
        child.send(ipc.AddRequest(request_of("a", fake_core.RAISE)))
        assert isinstance(child.receive(), ipc.Outputs)  # it is queued
        event = child.receive()
        assert isinstance(event, ipc.Failed)
        assert event.error.message == "RuntimeError: the device fell off"
        assert child.process.wait(WAIT_S) != 0  # also if nobody tells it to


def test_interrupt_is_ignored_and_terminate_is_obeyed() -> None:
    with raw_child() as child:
        child.wait_ready()
        child.process.send_signal(signal.SIGINT)
        child.send(ipc.GetStats())
        assert isinstance(child.receive(), ipc.Stats)
        child.process.send_signal(signal.SIGTERM)
        assert child.process.wait(WAIT_S) == -signal.SIGTERM


def test_an_interrupt_before_python_runs_in_the_child_is_ignored() -> None:
    with raw_child(is_interrupted=True) as child:
        assert child.wait_ready().num_kv_blocks == 77


@pytest.mark.parametrize("start_fault", ["", "hang"])
def test_the_end_of_stdin_ends_the_child_ready_or_not(start_fault: str) -> None:
    with raw_child(FakeOptions(start_fault=start_fault, phases=("begun",))) as child:
        assert isinstance(child.receive(), ipc.StartProgress)
        child.end_stdin()
        assert child.process.wait(WAIT_S) == EXIT_PARENT_GONE


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    with raw_child(parent_pid=2**22 + 1) as child:
        assert child.process.wait(WAIT_S) == EXIT_PARENT_GONE


PARENT_SCRIPT = """
import asyncio, sys
from fake_core import CHILD_ENV, ENDLESS, FACTORY, FakeOptions, request_of
from loraplex.server.engine_client import ClientOptions, EngineClient

async def main(prompt: int, start_fault: str) -> None:
    config = FakeOptions(start_fault=start_fault, phases=("begun",))
    options = ClientOptions(env=CHILD_ENV, stats_max_age_s=0.0, stats_timeout_s=0.1)
    client = EngineClient(config, factory=FACTORY, options=options)

    def say_pid(_: object = None) -> None:
        print(client._child.pid, flush=True)

    await client.start(say_pid if start_fault else None)
    stream = client.generate(request_of("a", prompt))
    request = asyncio.ensure_future(anext(stream))
    if prompt == ENDLESS:
        await request
    else:
        await asyncio.sleep(0)
        await client.stats()  # answered behind the request, or not at all if that hangs already
    say_pid()
    await asyncio.Event().wait()

asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("prompt", "start_fault"),
    [(fake_core.SILENT, ""), (fake_core.HANG, ""), (fake_core.ENDLESS, ""), (fake_core.SILENT, "hang")],
    ids=["idle", "hung", "busy", "loading"],
)
def test_a_child_dies_with_its_parent(prompt: int, start_fault: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT_SCRIPT, str(prompt), start_fault],
        stdout=subprocess.PIPE,
        env={**os.environ, **CHILD_ENV},
    )
    with parent:
        try:
            assert parent.stdout is not None
            child_pid = int(parent.stdout.readline())
            child_exit = ExitWatch(child_pid)
        finally:
            parent.kill()
        child_exit.wait()


class ExitWatch:
    """Notices the end of a process that is not our child; a zombie of a slow init counts as ended."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def wait(self) -> None:
        if self._pidfd is not None:
            ended, _, _ = select.select([self._pidfd], [], [], WAIT_S)
            os.close(self._pidfd)
            assert ended, "the child outlived its parent"
            return
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            try:
                os.kill(self._pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)
        raise AssertionError("the child outlived its parent")


class Wires:
    """An EngineLoop over in-process sockets: what is queued before `run` is there when it starts."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.core = FakeCore(FakeOptions())
        self.pool, self.host = ReplicaPool(), "127.0.0.1"
        self._commands_in, self._commands_out = self._pipe("inproc://commands")
        self._events_in, self._events_out = self._pipe("inproc://events")

    def _pipe(self, name: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        receiver, sender = self.context.socket(zmq.PULL), self.context.socket(zmq.PUSH)
        receiver.bind(name)
        sender.connect(name)
        return receiver, sender

    def run(self, *commands: ipc.Command) -> list[ipc.Event]:
        self._loop_with(commands).run()
        return self._events()

    def start(self, *commands: ipc.Command) -> list[ipc.Event]:
        assert self._loop_with(commands).start()
        return self._events()

    def _loop_with(self, commands: Sequence[ipc.Command]) -> EngineLoop:
        for command in commands:
            self._commands_out.send(ipc.encode(command))
        return EngineLoop(self.core, self._commands_in, self._events_out, self.pool, self.host)

    def _events(self) -> list[ipc.Event]:
        events = []
        while self._events_in.poll(0):
            events.append(ipc.decode_event(self._events_in.recv()))
        return events


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires()
    yield made
    made.pool.close()
    made.context.destroy(linger=0)


def test_a_few_waiting_commands_are_all_taken_before_a_step(wires: Wires) -> None:
    requests = [ipc.AddRequest(request_of(name)) for name in "abc"]
    wires.run(*requests, ipc.Shutdown())
    assert len(wires.core.running) == 3
    assert wires.core.num_steps == 0


def test_of_many_waiting_commands_the_rest_is_taken_after_the_next_step(wires: Wires) -> None:
    num_first, num_rest = _COMMANDS_A_STEP, 5
    requests = [request_of(f"r{i}", max_tokens=3) for i in range(num_first + num_rest)]
    events = wires.run(*map(ipc.AddRequest, requests), ipc.Shutdown())
    assert wires.core.num_steps == 1
    outputs = [event.outputs for event in events if isinstance(event, ipc.Outputs)]
    queued, stepped = outputs  # those of the rest are not reported: the shutdown is behind them
    names = [request.request_id for request in requests]
    assert [output.request_id for output in queued] == names[:num_first]
    assert [output.request_id for output in stepped] == names[:num_first]
    assert list(wires.core.running) == names


def test_a_replica_says_where_others_copy_adapters_from(wires: Wires) -> None:
    keys = CurveKeys.make()
    (joined,) = wires.run(ipc.JoinPool(keys.public, keys.secret), ipc.Shutdown())
    assert isinstance(joined, ipc.PoolJoined)
    assert joined.address.startswith("tcp://127.0.0.1:")
    assert wires.pool.is_joined


def test_a_replica_at_whose_address_nothing_can_listen_serves_on_from_files(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    keys, wires.host = CurveKeys.make(), "203.0.113.1"  # of nobody, by RFC 5737
    wires.run(ipc.JoinPool(keys.public, keys.secret), ipc.AddRequest(request_of("a")), ipc.Shutdown())
    assert list(wires.core.running) == ["a"]
    assert not wires.pool.is_joined
    assert "nothing can listen at 203.0.113.1" in caplog.text


def test_a_refused_request_is_answered_and_the_next_one_served(wires: Wires) -> None:
    events = wires.run(
        ipc.AddRequest(request_of("bad", fake_core.REJECT)),
        ipc.AddRequest(request_of("good")),
        ipc.Shutdown(),
    )
    refusal = ipc.ErrorInfo("InvalidRequestError", "this prompt is not liked", "prompt")
    assert events == [ipc.Rejected("bad", refusal)]
    assert list(wires.core.running) == ["good"]


def test_stats_come_after_what_was_asked_before_them(wires: Wires) -> None:
    events = wires.run(
        ipc.AddAdapter(spec_of("v1")),
        ipc.AddRequest(request_of("a", adapter="v1")),
        ipc.GetStats(),
        ipc.Cancel("a"),
        ipc.GetStats(),
        ipc.Shutdown(),
    )
    assert events[0] == ipc.AdapterAdded("v1")
    running = [event.stats.num_running for event in events if isinstance(event, ipc.Stats)]
    assert running == [1, 0]


def test_adapter_refusals_are_answered(wires: Wires) -> None:
    events = wires.run(
        ipc.AddAdapter(spec_of(fake_core.UNWANTED_VERSION)), ipc.RemoveAdapter("v9"), ipc.Shutdown()
    )
    assert events == [
        ipc.AdapterAdded("unwanted", ipc.ErrorInfo("AdapterFormatError", "rank must be positive", "r")),
        ipc.AdapterRemoved("v9", ipc.ErrorInfo("UnknownModelError", "no adapter v9")),
    ]


def test_an_engine_gets_ready_before_its_first_step(wires: Wires, tmp_path: Path) -> None:
    wires.core.to_prepare = [tmp_path / "gone"] * 3
    wires.start(ipc.AddRequest(request_of("early")), ipc.Prepare())
    assert wires.core.num_required == 0
    assert wires.core.num_steps == 0
    assert list(wires.core.running) == ["early"], "its turn comes when the engine is ready"


def test_objects_are_imported_by_name() -> None:
    assert import_object("loraplex.server.protocol_ipc:Ready") is ipc.Ready
    assert import_object("pathlib:Path.cwd")() == Path.cwd()


def test_an_exception_is_described_in_one_line() -> None:
    assert describe(ValueError("one\ntwo")) == "ValueError: one"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 10_000))) < 1000
