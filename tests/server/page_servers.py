"""Servers for tests of the web page: their engine says where its adapters are, and can be made to wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import server_fixtures
from serving_fakes import FakeEngine, Script, make_spec, says

from loraplex.core.clock import MonotonicClock
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.fleet.plan import Entry
from loraplex.server.engine_status import EngineState, EngineStatus, ReplicaStatus
from loraplex.server.served_adapter import ServedAdapter

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> & more"


class PageEngine(FakeEngine):
    """A FakeEngine whose adapters are in the tiers that tests put them. While `gate` is cleared, answers stop
    after their first tokens."""

    def __init__(self, script: Callable[[EngineRequest], Script]) -> None:
        super().__init__(script)
        self.tiers: dict[str, str] = {}
        self.loads: dict[str, int] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.are_held = threading.Semaphore(0)

    def move(self, version: str, tier: str, *, num_loads: int = 0) -> None:
        self.tiers[version] = tier
        self.loads[version] = self.loads.get(version, 0) + num_loads

    async def _outputs(self, request: EngineRequest, script: Script) -> AsyncGenerator[EngineOutput, None]:
        num_outputs = 0
        async for output in super()._outputs(request, script):
            num_outputs += 1
            if num_outputs == 6 and not self.gate.is_set():
                self.are_held.release()
                await asyncio.to_thread(self.gate.wait)
            yield output

    async def stats(self) -> EngineStats:
        return EngineStats(
            num_kv_blocks=100,
            num_kv_blocks_used=25,
            host_adapter_budget_bytes=1 << 30,
            device_arena_bytes=1 << 30,
            adapters=tuple(
                AdapterStats(
                    version=version,
                    tier=self.tiers.get(version, "disk"),
                    num_bytes=4096,
                    in_flight=0,
                    loads=self.loads.get(version, 0),
                )
                for version in self.adapters
            ),
        )


class PageFleet:
    """A fleet as its page sees it. `held`: the replicas that hold a version, by its plan."""

    num_plans = 1
    has_placement = True

    def __init__(self, held: dict[str, list[int]]) -> None:
        self.held = held
        status = EngineStatus(state=EngineState.READY, message="", num_restarts=0, pid=None)
        self.replicas = [
            ReplicaStatus(number=number, status=status, num_in_flight=0, num_sent=0, drained=False)
            for number in range(1 + max(max(replicas) for replicas in held.values()))
        ]

    def holders(self, version: str) -> list[int]:
        return self.held[version]

    def placed_on(self, version: str) -> Entry:
        replicas = tuple(self.held[version])
        return Entry(replicas, tuple(1 / len(replicas) for _ in replicas))

    def waiting(self, version: str) -> list[int]:
        return []

    def num_bytes(self, version: str) -> int:
        return 4096

    def drain(self, number: int, *, move: bool = False) -> None:
        self.replicas[number] = replace(self.replicas[number], drained=True)


def page_server(
    folder: Path, *, num_more: int = 0, **options: Any
) -> tuple[server_fixtures.Served, PageEngine]:
    """Return a server of the adapters pirate and poet and so many more, with its engine."""
    served = server_fixtures.make_server(
        folder, says(HOSTILE), make_engine=PageEngine, **{"clock": MonotonicClock()} | options
    )
    engine = served.engine
    assert isinstance(engine, PageEngine)
    for number in range(num_more):
        spec = make_spec(f"version-{number:04d}", path=folder / "more", rank=8)
        engine.adapters[spec.version] = spec
        name = f"tenant-{number:04d}"
        served.service._served[name] = ServedAdapter(name=name, spec=spec)
    return served, engine
