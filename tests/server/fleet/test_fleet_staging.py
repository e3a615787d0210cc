"""The replicas that a version must be staged on, and those that may be away."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from engine_client_harness import client_of, pid_of, run, running, wait_for_state
from fake_core import spec_of

from loraplex.core.errors import AdapterError, EngineDeadError, LoraplexError
from loraplex.fleet.policy import Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.server.engine_client import EngineClient
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.fleet_engine import FleetEngine
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.placing import bring_in
from loraplex.server.fleet.routing_events import Limits
from loraplex.server.restart_policy import RestartPolicy

DEAD = EngineDeadError("the engine process died")
BROKEN = AdapterError("its weights file ends too early")


@asynccontextmanager
async def fleet_of(*failures: LoraplexError | None) -> AsyncIterator[tuple[FleetEngine, list[int]]]:
    """Yield a fleet with a replica for each failure that staging on it ends with, and the numbers of those
    that a version was staged on."""
    staged: list[int] = []

    def make(number: int) -> EngineClient:
        client, real = client_of(), EngineClient.stage_adapter

        async def stage_adapter(version: str) -> None:
            if (failure := failures[number]) is not None:
                raise failure
            await real(client, version)
            staged.append(number)

        client.stage_adapter = stage_adapter  # type: ignore[method-assign]
        return client

    costs = find_profile(Path("h200-llama-2-7b"))
    assert isinstance(costs, CostModel)
    setup = FleetSetup(
        make=make,
        limits=lambda info: Limits(max_running=8, kv_tokens=512),
        policy=Policy.of("round-robin"),
        costs=costs,
    )
    fleet = FleetEngine(setup, len(failures))
    await fleet.start()
    try:
        yield fleet, staged
    finally:
        await fleet.close()


@pytest.mark.parametrize(
    ("failures", "raised"),
    [
        ([None, None], None),
        ([None, BROKEN], BROKEN),
        ([DEAD, BROKEN], BROKEN),
        ([None, DEAD], None),
        ([DEAD, DEAD], DEAD),
    ],
)
def test_every_replica_that_lives_must_have_the_version(
    failures: Sequence[LoraplexError | None], raised: LoraplexError | None
) -> None:
    async def scenario() -> None:
        async with fleet_of(*failures) as (fleet, staged):
            await fleet.add_adapter(spec_of("v"))
            if raised is None:
                await fleet.stage_adapter("v")
            else:
                with pytest.raises(type(raised), match=str(raised)):
                    await fleet.stage_adapter("v")
            assert sorted(staged) == [number for number, each in enumerate(failures) if each is None]

    run(scenario())


def test_nobody_waits_for_a_replica_that_died_since_it_was_chosen() -> None:
    never = RestartPolicy(first_delay_s=3600.0, max_delay_s=3600.0)

    async def scenario() -> None:
        async with running(restart=never, ready_timeout_s=3600.0) as client:
            await client.add_adapter(spec_of("v"))
            os.kill(pid_of(client), signal.SIGKILL)
            await wait_for_state(client, EngineState.RESTARTING)
            with pytest.raises(EngineDeadError, match="not ready"):
                await bring_in(client, "v")

    run(scenario())


def test_a_version_that_no_replica_knows_cannot_be_staged() -> None:
    async def scenario() -> None:
        async with fleet_of(None, None) as (fleet, staged):
            with pytest.raises(LoraplexError, match="no adapter nobody"):
                await fleet.stage_adapter("nobody")
            assert staged == []

    run(scenario())
