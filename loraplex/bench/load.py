"""Two ways to load a server: a closed loop of workers, and an open loop that replays arrivals.

Both return one record per request, in the order of the requests given, failed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from loraplex.bench.client import BenchRequest, Clock
from loraplex.bench.records import RequestRecord

OnDone = Callable[[RequestRecord], None]
Sleep = Callable[[float], Awaitable[None]]
T = TypeVar("T")


class Client(Protocol):
    """The part of a client that the load generators use."""

    @property
    def clock(self) -> Clock: ...

    async def complete(self, request: BenchRequest, *, arrival_s: float | None = None) -> RequestRecord: ...


def ignore(_: RequestRecord) -> None:
    """Do nothing; the default `on_done`."""


async def closed_loop(
    client: Client,
    requests: Sequence[BenchRequest],
    *,
    concurrency: int,
    on_done: OnDone = ignore,
) -> list[RequestRecord]:
    """Run `concurrency` workers, each sending its next request when its last one has ended.

    A request arrives when a worker takes it, so this does not show the queueing that independent users cause;
    the open loop does.
    """
    todo = iter(enumerate(requests))
    records: dict[int, RequestRecord] = {}

    async def work() -> None:
        for index, request in todo:  # shared: each worker takes the next request that is left
            records[index] = await client.complete(request)
            on_done(records[index])

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(work())
    return [records[index] for index in range(len(requests))]


async def open_loop(
    client: Client,
    requests: Sequence[BenchRequest],
    *,
    arrivals_s: Sequence[float],
    on_done: OnDone = ignore,
    sleep: Sleep = asyncio.sleep,
) -> list[RequestRecord]:
    """Send each request at its arrival time, however many are still in flight.

    Latency counts from the time a request was due, not from when this process managed to send it: a client
    that falls behind must not hide the server's delay, or its own.
    """
    start_s = client.clock()

    async def send(request: BenchRequest, due_s: float) -> RequestRecord:
        record = await client.complete(request, arrival_s=due_s)
        on_done(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks: list[asyncio.Task[RequestRecord]] = []
        for request, arrival_s in zip(requests, arrivals_s, strict=True):
            due_s = start_s + arrival_s
            if (wait_s := due_s - client.clock()) > 0:
                await sleep(wait_s)
            tasks.append(group.create_task(send(request, due_s)))
    return [task.result() for task in tasks]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on uvloop if installed: the client's CPU time is taken from the server."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
