"""An engine process behind TCP: who may connect to it, and its life as the front sees it. Without Ray: the
actor's own class takes its part in this process."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import fake_core
import pytest
import zmq
from engine_client_harness import QUICK, pid_of, run, tokens, until
from fake_core import CHILD_ENV, FACTORY, FakeOptions, request_of, spec_of, tokens_of

from loraplex.core import errors
from loraplex.server.engine_client import ClientOptions, EngineClient
from loraplex.server.engine_sockets import CurveKeys, new_socket
from loraplex.server.fleet.ray_actor import EngineActor
from loraplex.server.fleet.ray_child import RayChild
from loraplex.server.fleet.ray_cluster import RayCluster, RayPlace, Seat
from loraplex.server.fleet.ray_messages import (
    Connected,
    Ended,
    Node,
    Order,
    Place,
    Placed,
    Release,
    Released,
    Run,
    Running,
)
from loraplex.server.protocol_ipc import Event, has_message
from loraplex.server.remote_sockets import RemoteSockets

LOOPBACK = "127.0.0.1"
WAIT_MS = 60_000
NODE = Node(host=LOOPBACK, cpus=2, gpus=0)


class OnThisMachine(RayCluster):
    """Does what a driver does, with actors that are objects of this process."""

    def __init__(self, *, refuses: str | None = None) -> None:
        super().__init__(RayPlace())
        self._refuses = refuses
        self._actors: dict[int, EngineActor] = {}
        self.num_actors = 0

    async def about(self, wait_s: float = 0.0) -> Connected:
        return Connected(host=LOOPBACK, nodes=[NODE], free=NODE)

    def send(self, order: Order) -> None:
        match order:
            case Place(engine_id, replica):
                if self._refuses is not None:
                    self._seats[engine_id].hear(Ended(engine_id, self._refuses))
                    return
                if replica not in self._actors:
                    actor = self._actors[replica] = EngineActor()
                    actor._host = LOOPBACK
                    self.num_actors += 1
                _, _, key = self._actors[replica].about()
                self._seats[engine_id].hear(Placed(engine_id, LOOPBACK, key))
            case Run(engine_id, replica, launch):
                actor, seat = self._actors[replica], self._seats[engine_id]
                if actor._process is not None:
                    actor.wait()  # a real actor runs its calls one after the other
                seat.hear(Running(engine_id, actor.run(launch)))
                self._report_end(actor.wait, seat, engine_id)
            case Release(engine_id, replica):
                actor = self._actors.pop(replica, None)
                if actor is not None and actor._process is not None:
                    actor._process.kill()
                self._seats[engine_id].hear(Released(engine_id))

    def _report_end(self, wait: Callable[[], str], seat: Seat, engine_id: int) -> None:
        loop = asyncio.get_running_loop()

        def report() -> None:
            reason = wait()
            if not loop.is_closed():
                loop.call_soon_threadsafe(seat.hear, Ended(engine_id, reason))

        threading.Thread(target=report, daemon=True).start()


@pytest.fixture(autouse=True)
def _finds_the_fake_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CHILD_ENV.items():
        monkeypatch.setenv(name, value)


def client_on(cluster: RayCluster, config: FakeOptions | None = None) -> EngineClient:
    options = config or FakeOptions()

    def start_child(on_event: Callable[[Event], None]) -> RayChild:
        return RayChild(
            cluster, 0, factory=FACTORY, config=options, resources={"CPU": 1.0}, wait_s=1.0, on_event=on_event
        )

    patience = ClientOptions(restart=QUICK, stats_max_age_s=0.0)
    return EngineClient(options, factory=FACTORY, options=patience, start_child=start_child)


@asynccontextmanager
async def running(cluster: RayCluster) -> AsyncIterator[EngineClient]:
    client = client_on(cluster)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def is_back(client: EngineClient, num_restarts: int) -> None:
    async def back() -> bool:
        return client.healthy and client.status.num_restarts == num_restarts

    await until(back)


def test_it_answers_and_leaves_when_it_is_closed() -> None:
    async def scenario() -> None:
        async with running(OnThisMachine()) as client:
            assert client.status.node == LOOPBACK
            pid = pid_of(client)
            await client.add_adapter(spec_of("a"))
            request = request_of("r", max_tokens=40, adapter="a")
            assert await tokens(client, request) == tokens_of(request)
            assert (await client.stats()).adapters[0].version == "a"
        assert not is_running(pid)

    run(scenario())


def test_one_that_dies_starts_anew_in_the_place_it_has() -> None:
    async def scenario() -> None:
        cluster = OnThisMachine()
        async with running(cluster) as client:
            await client.add_adapter(spec_of("a"))
            os.kill(pid_of(client), signal.SIGKILL)
            await is_back(client, 1)
            request = request_of("r", adapter="a")
            assert await tokens(client, request) == tokens_of(request)
            with pytest.raises(errors.EngineDeadError, match="the device fell off"):
                await tokens(client, request_of("broken", prompt=fake_core.RAISE))
            await is_back(client, 2)
            assert cluster.num_actors == 1

    run(scenario())


@pytest.mark.slow
def test_one_that_does_not_move_is_given_up_with_its_place() -> None:
    async def scenario() -> None:
        cluster = OnThisMachine()
        async with running(cluster) as client:
            stopped = pid_of(client)
            os.kill(stopped, signal.SIGSTOP)
            with pytest.raises(errors.EngineDeadError, match="has given no sign of life"):
                await tokens(client, request_of("r"))
            await is_back(client, 1)
            assert cluster.num_actors == 2
            assert not is_running(stopped)

    run(scenario())


def test_an_engine_whose_front_is_gone_leaves() -> None:
    async def scenario() -> None:
        cluster = OnThisMachine()
        client = client_on(cluster)
        await client.start()
        pid = pid_of(client)
        child = client._child
        assert isinstance(child, RayChild)
        child._release()  # as if this process, or its machine, had ended

        async def left() -> bool:
            return not is_running(pid)

        await until(left)
        await client.close()

    run(scenario())


@pytest.mark.parametrize(
    ("cluster", "config", "error", "words"),
    [
        (
            OnThisMachine,
            FakeOptions(start_fault="model"),
            errors.ModelError,
            "on node 127.0.0.1: this model has no layers (nodes need the model's files under the same path)",
        ),
        (
            OnThisMachine,
            FakeOptions(start_fault="exit"),
            errors.EngineDeadError,
            "the engine process ended while starting: exit code 7, on node 127.0.0.1; the log says why",
        ),
        (
            lambda: OnThisMachine(refuses="Ray has no node with 1 CPU free"),
            FakeOptions(),
            errors.UserError,
            "replica 0 cannot be placed: Ray has no node with 1 CPU free",
        ),
    ],
    ids=["model", "exit", "placing"],
)
def test_a_start_that_fails_says_why_and_where(
    cluster: Callable[[], RayCluster], config: FakeOptions, error: type[Exception], words: str
) -> None:
    async def scenario() -> None:
        client = client_on(cluster(), config)
        with pytest.raises(error) as caught:
            await client.start()
        assert str(caught.value) == words
        await client.close()

    run(scenario())


def test_the_front_hears_none_but_the_engine_that_it_admits() -> None:
    """And the engine accepts only the front whose key it has."""
    front, others = zmq.Context(), zmq.Context()
    sockets = RemoteSockets(front, LOOPBACK)
    engine, stranger = CurveKeys.make(), CurveKeys.make()
    opened: list[zmq.Socket[bytes]] = []

    def push(keys: CurveKeys | None, front_key: str, message: bytes) -> zmq.Socket[bytes]:
        """Send a message; return a socket that reports if it is refused."""
        socket = new_socket(others, zmq.PUSH)
        if keys is not None:
            socket.curve_serverkey = front_key.encode()
            socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        refused = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(sockets.remote.events)
        socket.send(message)
        opened.append(socket)
        return refused

    try:
        key = sockets.remote.front_key
        refused = [push(engine, key, b"the engine's, while nobody is admitted")]
        assert refused[0].poll(WAIT_MS)
        sockets.admit(engine.public)
        refused = [
            push(stranger, key, b"a stranger's"),
            push(engine, stranger.public, b"the engine's, for another front"),
            push(None, key, b"without a key"),
        ]
        assert all(each.poll(WAIT_MS) for each in refused)
        push(engine, key, b"the engine's")
        assert sockets.events.poll(WAIT_MS)
        assert sockets.events.recv() == b"the engine's"
        assert not has_message(sockets.events)
    finally:
        sockets.close()
        others.destroy(linger=0)
        front.destroy(linger=0)
