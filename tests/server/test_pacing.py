"""Bursts are admitted a few requests at a time, first come first served."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from engine_client_harness import both_loops, run
from server_fixtures import Served, live
from test_live_server import connect, request_bytes

from loraplex.core.clock import ManualClock
from loraplex.server.pacing import PacedListener, Pacer, SlicedWork

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def test_a_few_pass_in_each_turn_of_the_loop_in_order() -> None:
    async def go() -> list[list[int]]:
        pacer, turns = Pacer(per_turn=3), [[]]
        done = asyncio.Event()

        async def caller(number: int) -> None:
            await pacer.turn()
            turns[-1].append(number)
            if number == 9:
                done.set()

        tasks = [asyncio.create_task(caller(number)) for number in range(10)]
        while not done.is_set():
            await asyncio.sleep(0)
            turns.append([])
        await asyncio.gather(*tasks)
        return [turn for turn in turns if turn]

    turns = asyncio.run(go())
    assert [number for turn in turns for number in turn] == list(range(10))
    assert max(map(len, turns)) <= 3


def test_a_single_caller_never_waits() -> None:
    async def go() -> None:
        pacer = Pacer(per_turn=1)
        for _ in range(3):
            passing = pacer.turn()
            try:
                passing.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("it waited")
            await asyncio.sleep(0)  # the next iteration of the loop
            await asyncio.sleep(0)

    asyncio.run(go())


def test_callers_that_gave_up_take_nobodys_turn() -> None:
    async def go() -> list[int]:
        pacer, passed = Pacer(per_turn=1), []

        async def caller(number: int) -> None:
            await pacer.turn()
            passed.append(number)

        tasks = [asyncio.create_task(caller(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return passed

    assert asyncio.run(go()) == [0, 2, 3]


def test_work_takes_turns_and_what_is_short_goes_first() -> None:
    clock, done = ManualClock(), []

    def work(name: str, num_slices: int) -> Callable[[], bool]:
        def do_slice() -> bool:
            clock.advance(1.0)
            done.append(name)
            return done.count(name) < num_slices

        return do_slice

    async def go() -> None:
        sliced = SlicedWork(clock, per_turn_s=2.0)
        sliced.do(work("a", 5))
        assert done == ["a", "a"], "as long as there is time in this turn"
        sliced.do(work("b", 3))
        assert done == ["a", "a"]
        await asyncio.sleep(0)
        assert done[2:] == ["a", "b"]
        sliced.do(work("c", 1))
        sliced.do_later(work("d", 1))
        await asyncio.sleep(0)
        assert done[4:] == ["a", "c"], "one of those that wait, and then who comes first"
        for _ in range(3):
            num_done = len(done)
            await asyncio.sleep(0)
            assert len(done) <= num_done + 2
        assert done[6:] == ["b", "d", "a", "b"]

    asyncio.run(go())


def test_urgent_work_goes_first_and_holds_up_none_for_ever() -> None:
    clock, done = ManualClock(), []

    def work(name: str) -> Callable[[], bool]:
        def do_slice() -> bool:
            clock.advance(1.0)
            done.append(name)
            return False

        return do_slice

    async def go() -> None:
        sliced = SlicedWork(clock, per_turn_s=4.0)
        for _ in range(4):
            sliced.do(work("before"))  # all that there is time for in this iteration
        for _ in range(5):
            sliced.do(work("first"))
        for _ in range(9):
            sliced.do(work("urgent"), urgent=True)
        sliced.do_later(work("rest"))
        await asyncio.sleep(0)
        assert done[4:] == ["urgent", "rest", "first", "urgent"]
        await asyncio.sleep(0)
        assert done[8:] == ["urgent", "first", "urgent", "urgent"]
        for _ in range(3):
            await asyncio.sleep(0)
        assert done.count("urgent") == 9
        assert done.count("first") == 5

    asyncio.run(go())


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.write(b"hi")
        transport.close()


class Listener(socket.socket):
    """Listens on loopback; keeps what it accepted, and counts the attempts."""

    def __init__(self) -> None:
        super().__init__()
        self.accepted: list[socket.socket] = []
        self.num_tries = 0
        self.bind(("127.0.0.1", 0))
        self.setblocking(False)
        self.listen(100)

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_tries += 1
        connection, address = super().accept()
        self.accepted.append(connection)
        return connection, address

    def connect_clients(self, count: int) -> list[socket.socket]:
        clients = [socket.create_connection(self.getsockname()) for _ in range(count)]
        for client in clients:
            client.setblocking(False)
        return clients


async def heard(clients: list[socket.socket]) -> list[bytes]:
    """Return the first bytes that each client gets, and the end of the connection."""
    loop, found = asyncio.get_running_loop(), []
    for client in clients:
        found.append(await loop.sock_recv(client, 2))
        client.close()
    return found


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Nothing can be opened in this process, so the system's own error is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as free:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free.fileno() + 1, hard))
        spare = []
        with contextlib.suppress(OSError):
            while True:
                spare.append(os.dup(0))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in spare:
                os.close(descriptor)


@both_loops
def test_a_listener_accepts_bursts_and_ends(loop_factory: LoopFactory) -> None:
    async def go() -> None:
        with Listener() as listener:
            clients = listener.connect_clients(50)
            server = PacedListener(listener, Greeter)
            assert await heard(clients) == [b"hi"] * 50
            server.close()
            await server.wait_closed()

    run(go(), loop_factory)


@both_loops
@pytest.mark.parametrize("num_turns", range(5))
def test_a_listener_that_is_closed_leaves_no_connection_open(
    loop_factory: LoopFactory, num_turns: int
) -> None:
    """This holds whether a connection was just accepted, is being set up, or is ready."""

    async def go() -> None:
        with Listener() as listener:
            clients = listener.connect_clients(50)
            server = PacedListener(listener, Greeter)
            for _ in range(num_turns):
                await asyncio.sleep(0)
            server.close()
            await server.wait_closed()
            listener.close()  # what it has not accepted is refused by the system
            for client in clients:
                with contextlib.suppress(ConnectionResetError):
                    assert (await heard([client]))[0] in (b"hi", b"")
                client.close()
            for _ in range(3):  # loops close their descriptors an iteration later
                await asyncio.sleep(0)
            assert [each for each in listener.accepted if each.fileno() >= 0] == []

    run(go(), loop_factory)


def test_without_descriptors_a_listener_waits_and_goes_on_when_there_are_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def go() -> None:
        with Listener() as listener:
            clients = listener.connect_clients(3)
            with no_more_descriptors():
                server = PacedListener(listener, Greeter, retry_s=0.001)
                while listener.num_tries < 4:
                    await asyncio.sleep(0)
                assert listener.accepted == []
            assert await heard(clients) == [b"hi"] * 3
            server.close()
            await server.wait_closed()

    run(go())
    assert [record.message.partition(": ")[0] for record in caplog.records] == [
        "no connection can be accepted"
    ]


def test_without_descriptors_a_listener_leaves_the_loop_to_others() -> None:
    async def go() -> None:
        with Listener() as listener:
            clients = listener.connect_clients(1)
            with no_more_descriptors():
                server = PacedListener(listener, Greeter, retry_s=3600)
                for _ in range(100):
                    await asyncio.sleep(0)
                assert listener.num_tries == 1
            server.close()
            await server.wait_closed()
            clients[0].close()

    run(go())


def test_a_client_that_leaves_before_its_turn_asks_nothing_of_the_engine(
    make_served: Callable[..., Served],
) -> None:
    served = make_served()
    pacer = served.deps.pacer
    pacer._per_turn = 0
    with live(served) as url:
        with connect(url) as connection:
            connection.sendall(request_bytes("/v1/completions", {"model": "base", "prompt": "hi"}))
            while not pacer._waiting:
                httpx.get(f"{url}/health")
        httpx.get(f"{url}/health")  # by then the loop has seen that the other client has disconnected
        pacer._per_turn = 4
        assert httpx.get(f"{url}/v1/models").status_code == 200  # queued behind it
        while served.deps.waiting.num_requests:
            httpx.get(f"{url}/health")
    assert served.engine.requests == []


def test_requests_in_line_reach_the_engine_in_the_order_they_came_while_probes_pass(
    make_served: Callable[..., Served],
) -> None:
    served = make_served()
    pacer = served.deps.pacer
    pacer._per_turn = 0
    prompts = [[number] for number in range(3, 9)]
    with live(served) as url, contextlib.ExitStack() as stack:
        connections = []
        for num_before, prompt in enumerate(prompts):
            connection = stack.enter_context(connect(url))
            connection.sendall(request_bytes("/v1/completions", {"model": "base", "prompt": prompt}))
            connections.append(connection)
            while len(pacer._waiting) <= num_before:
                assert httpx.get(f"{url}/health").status_code == 200
        pacer._per_turn = 1
        assert httpx.get(f"{url}/v1/models").status_code == 200  # queued behind them, and served next
        for connection in connections:
            assert connection.recv(12) == b"HTTP/1.1 200"
    assert [list(request.prompt_token_ids) for request in served.engine.requests] == prompts
    assert not pacer._waiting
