"""Replicas around servers of the tests, and how tests drive them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from server_fixtures import SHAPE, write_adapter

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.interface import AsyncEngine
from loraplex.engine.output_stream import merge_outputs
from loraplex.server.fleet.backend_http import BackendAddress
from loraplex.server.fleet.backend_identity import ExpectedBase
from loraplex.server.fleet.http_replica import HttpReplica
from loraplex.server.fleet.http_replica_options import HttpReplicaOptions

WAIT_S = 120.0
BASE = "acme/tiny"
TINY = ExpectedBase.of(BASE)
_numbers = itertools.count()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await scenario

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as in a server
        runner.run(bounded())


def spec_in(folder: Path, **options: Any) -> AdapterSpec:
    """Return the spec of an adapter that is written to a folder."""
    return read_adapter(write_adapter(folder, **options), SHAPE)


def replica_of(
    url: str,
    expected: ExpectedBase = TINY,
    *,
    key: str | None = None,
    admin: str | None = None,
    **options: Any,
) -> HttpReplica:
    quick = {"busy_interval_s": 0.02, "idle_interval_s": 0.05, "silence_s": 5.0, "stats_max_age_s": 0.0}
    return HttpReplica(
        BackendAddress(url=url, api_key=key, admin_key=admin),
        expected,
        options=HttpReplicaOptions(**{**quick, "max_pause_s": 0.1, **options}),
    )


@asynccontextmanager
async def started(url: str, expected: ExpectedBase = TINY, **options: Any) -> AsyncIterator[HttpReplica]:
    replica = replica_of(url, expected, **options)
    await replica.start()
    try:
        yield replica
    finally:
        await replica.close()


def request_for(
    prompt: list[int], *, adapter: str | None = None, eos: tuple[int, ...] = (), **params: Any
) -> EngineRequest:
    return EngineRequest(
        request_id=f"request-{next(_numbers)}",
        prompt_token_ids=prompt,
        params=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **params}),
        adapter=adapter,
        eos_token_ids=eos,
    )


async def answer(engine: AsyncEngine, request: EngineRequest) -> EngineOutput:
    """Return all outputs merged into one."""
    return merge_outputs([output async for output in engine.generate(request)])


async def until(condition: Callable[[], bool] | Callable[[], Awaitable[bool]]) -> None:
    """Poll for a condition in another process that sends no notification; `run` bounds the time."""
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        await asyncio.sleep(0.01)
