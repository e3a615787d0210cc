"""Carry out the decisions of a fleet's policy: replicas load adapters, requests move."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextvars import Context
from typing import Final

from loraplex.core.clock import Clock, MonotonicClock
from loraplex.core.errors import EngineClosedError, EngineDeadError, LoraplexError
from loraplex.server.fleet.fleet_requests import FleetRequests
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.replica import Replica

logger = logging.getLogger(__name__)

_LOOK_S: Final = 0.5
"""Seconds between checks whether replicas came or went."""
_AT_ONCE: Final = 2
"""Number of adapters that a replica loads concurrently for a placement, in addition to those that requests
need."""
_STAGE_TIMEOUT_S: Final = 300.0


async def bring_in(replica: Replica, version: str) -> None:
    """Have a replica load a version that it knows, ready for use. Raises as AsyncEngine.stage_adapter does,
    and EngineDeadError at once if the replica is not ready."""
    # It may have died since it was chosen. An engine would wait for its restart, and so would callers that
    # can do without this replica: the load that stages the version, and other adapters that a placement
    # moves.
    if not replica.healthy:
        raise EngineDeadError("the replica is not ready")
    await replica.stage_adapter(version)


class Placing:
    """Asks a routing periodically for decisions, and carries them out. `num_plans`: number of plans that
    changed anything; `num_brought`: number of adapters that each replica loaded for one."""

    def __init__(
        self, routing: LiveRouting, members: Members, requests: FleetRequests, clock: Clock | None = None
    ) -> None:
        self._routing = routing
        self._members = members
        self._requests = requests
        self._clock = clock or MonotonicClock()
        self._turns: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_AT_ONCE))
        self._stagings: set[asyncio.Task[None]] = set()
        self.num_plans = 0
        self.num_brought: Counter[int] = Counter()
        self._problem = ""  # the last one logged, while it lasts

    async def run(self) -> None:
        """Decide whenever it is time, until cancelled."""
        while True:
            left_s = self._routing.next_tick_s - self._clock.now_s()
            # A decision that is overdue could not be made because no replica serves: one may come back.
            await asyncio.sleep(min(left_s, _LOOK_S) if left_s > 0 else _LOOK_S)
            self.tick_if_possible()

    def tick_if_possible(self) -> None:
        """Call `tick`, and log a plan that does not fit the fleet, once while it does not."""
        try:
            self.tick()
            self._problem = ""
        except LoraplexError as error:
            if str(error) != self._problem:
                logger.error("adapters stay where they are: %s", error)
            self._problem = str(error)

    async def close(self) -> None:
        for task in self._stagings:
            task.cancel()
        await asyncio.gather(*self._stagings, return_exceptions=True)

    def tick(self) -> None:
        """Make pending decisions now, and begin to carry them out. Raises UserError for a plan that does not
        fit the fleet."""
        for number, member in enumerate(self._members):
            if not member.healthy:
                self._routing.lost(number)
        found = self._routing.tick(self._clock.now_s(), self._members.serving, self._requests.num_output)
        if found is None:
            return
        if found.event.placed:
            self.num_plans += 1
        wanted: defaultdict[int, list[str]] = defaultdict(list)
        for replica, version in found.stages:
            wanted[replica].append(version)
        for replica, versions in wanted.items():
            # Not in the caller's context, which would put the id of a request on its log lines.
            task = asyncio.create_task(self._stage_all(replica, versions), context=Context())
            self._stagings.add(task)
            task.add_done_callback(self._stagings.discard)
        if found.event.moves:
            made = self._requests.move(found.event.moves)
            logger.info("%d requests migrate", len(made))

    async def _stage_all(self, replica: int, versions: Sequence[str]) -> None:
        """Have a replica load versions for a placement, and log in one line those that failed."""
        problems = await asyncio.gather(*(self._stage(replica, version) for version in versions))
        if failed := [each for each in zip(versions, problems, strict=True) if each[1] is not None]:
            (version, reason), number = failed[0], len(failed)
            logger.warning(
                "replica %d does not get %d of %d adapters, which stay where they are until the next plan; "
                "the first is version %s: %s",
                *(replica, number, len(versions), version[:12], reason),
            )

    async def _stage(self, replica: int, version: str) -> str | None:
        """Have a replica load a version; return why that failed, or None if it did not or the replica has
        left."""
        is_there, problem = False, None
        try:
            async with self._turns[replica], asyncio.timeout(_STAGE_TIMEOUT_S):
                if not self._routing.wants(replica, version):  # it is no longer wanted
                    return None
                await bring_in(self._members[replica], version)
            is_there = True
            self.num_brought[replica] += 1
        except EngineClosedError:
            logger.info("replica %d left before it had adapter version %s", replica, version[:12])
        except (LoraplexError, TimeoutError) as error:
            problem = str(error) or f"it took longer than {_STAGE_TIMEOUT_S:g} s"
        self._routing.staged(replica, version, is_there=is_there)
        return problem
