"""Many engines as one: every request goes to the replica that the fleet's router chooses.

A request whose replica dies or hands it over is continued on another one from the tokens it has. All replicas
know all adapters; each has in memory those that it is placed with or has requests for (`placing`). Replicas
join, leave and are replaced while others serve; a replica keeps its number, and one that has left may come
back under it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import LoraplexError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.fleet.answer_length import FIRST_GUESS
from loraplex.fleet.plan import Entry
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.continuing import Continued
from loraplex.server.engine_status import EngineState, EngineStatus, ReplicaStatus
from loraplex.server.errors import ServerStartingError
from loraplex.server.fleet.adapter_memory import AdapterMemory
from loraplex.server.fleet.decision_log import DecisionLog
from loraplex.server.fleet.fleet_adapters import FleetAdapters
from loraplex.server.fleet.fleet_requests import FleetRequests
from loraplex.server.fleet.fleet_setup import FleetSetup
from loraplex.server.fleet.fleet_start import FleetStart
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.placing import Placing
from loraplex.server.fleet.replica_changes import ReplicaChanges
from loraplex.server.fleet.routing_events import Began
from loraplex.server.protocol_ipc import Ready, StartProgress
from loraplex.server.replica import Replica
from loraplex.server.shadow_twin import TwinSubject

logger = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
"""Seconds between reports of replicas on the adapters they have."""


class FleetEngine:
    """A SupervisedEngine made of replicas."""

    def __init__(self, setup: FleetSetup, num_replicas: int, log: DecisionLog | None = None) -> None:
        """`log`: where the decisions of the routing are written."""
        self._setup = setup
        self._members = Members(
            [setup.make(number) for number in range(num_replicas)], are_servers=setup.may_lack
        )
        self._requests = FleetRequests(self._members, setup.clock)
        self._log = log
        self._routing: LiveRouting | None = None
        self._placing: Placing | None = None
        self._adapters = FleetAdapters(self._members, may_lack=setup.may_lack)
        self._memory = AdapterMemory()
        self._changes = ReplicaChanges(setup, self._members, self._adapters, self._memory, self.place)
        self._tasks: list[asyncio.Task[None]] = []
        self.failed = asyncio.Event()
        self.info: Ready | None = None

    # ---- its life

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        """See SupervisedEngine. The progress is that of the first replica: all do the same in parallel."""
        setup, lacking = self._setup, dict[int, LoraplexError]()
        starting = FleetStart(self._members, on_progress, add_adapters)
        try:
            if setup.may_lack:
                lacking = await starting.wait_for_some(setup.rest_s)
            else:
                await starting.wait_for_all()
        except BaseException as error:
            self._adapters.start_error = error if isinstance(error, Exception) else None
            await starting.cancel()
            await self.close()
            raise
        finally:
            self._adapters.start_ended.set()
        for number, problem in lacking.items():
            self._changes.revival.plan(number, str(problem))
            logger.warning(
                "the fleet starts without replica %d, which is asked again in %g s, and then ever more "
                "rarely: %s",
                *(number, setup.retry_s[0], problem),
            )
        infos = [replica.info for replica in self._members if replica.info is not None]
        self.info = Ready(
            num_kv_blocks=sum(info.num_kv_blocks or 0 for info in infos) or None,
            max_model_len=min(info.max_model_len for info in infos),
            load_s=max(info.load_s for info in infos),
            costs=infos[0].costs,
            policy=infos[0].policy,
        )
        began = Began(
            policy=setup.policy.name,
            # A replica that is not there yet joins with its own limits.
            limits=[setup.limits(replica.info or infos[0]) for replica in self._members],
            costs=infos[0].costs or profile_to_json(setup.costs),
            mean_tokens=FIRST_GUESS,
            period_s=setup.period_s,
            device_bytes=await self._device_bytes(),
            now_s=setup.clock.now_s(),
        )
        if self._log is not None:
            self._log.begin([began])
        self._routing = LiveRouting([began], None if self._log is None else self._log.record)
        self._requests.routing = self._adapters.routing = self._changes.routing = self._routing
        for spec in self._adapters.specs():
            self._routing.add(spec)
        self._placing = Placing(self._routing, self._members, self._requests, setup.clock)
        self._placing.tick()
        self._memory.log(self._routing)
        loops = (self._look, self._watch_failures, self._changes.revival.run, self._placing.run)
        self._tasks = [asyncio.create_task(_kept_up(loop)) for loop in loops]

    async def _device_bytes(self) -> int | None:
        """Return the smallest memory of all replicas that adapters share with the KV cache; None if there is
        none."""
        ready = [(number, replica) for number, replica in enumerate(self._members) if replica.healthy]
        each = await asyncio.gather(*(replica.stats() for _, replica in ready))
        for (number, _), stats in zip(ready, each, strict=True):
            self._memory.saw(number, stats)
        return min(stats.device_arena_bytes for stats in each) or None

    async def close(self) -> None:
        self._requests.is_closing = True
        self._adapters.start_ended.set()
        await self._changes.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._placing is not None:
            await self._placing.close()
        await asyncio.gather(*(replica.close() for replica in self._members))
        if self._log is not None:
            await asyncio.to_thread(self._log.write, self._log.take())

    @property
    def healthy(self) -> bool:
        return bool(self._members.serving)

    @property
    def status(self) -> EngineStatus:
        return self._members.status

    @property
    def replicas(self) -> list[ReplicaStatus]:
        routing, placing = self._routing, self._placing
        if routing is None or placing is None:
            return self._members.statuses(lambda number: 0)
        placed = [
            [version for version in versions if version not in replica.refused]
            for versions, replica in zip(routing.placed(), self._members, strict=True)
        ]
        shortages = self._memory.shortages(placed, is_everywhere=routing.is_everywhere)
        return [
            replace(
                each,
                status=_with_message(each.status, shortages.get(each.number)),
                num_placed=len(placed[each.number]),
                num_brought=placing.num_brought[each.number],
                num_migrated=self._requests.num_migrated[each.number],
            )
            for each in self._members.statuses(routing.num_in_flight)
        ]

    @property
    def num_plans(self) -> int:
        """See Fleet."""
        return 0 if self._placing is None else self._placing.num_plans

    def drain(self, number: int, *, move: bool = False) -> None:
        """See `Members.drain`. The replica finishes its requests; with `move`, others continue them."""
        self._members.drain(number)
        if move:
            self._members[number].hand_over()

    def undrain(self, number: int) -> None:
        self._members.undrain(number)

    def place(self) -> None:
        """Decide now where adapters are placed and which requests move, if there is anything to decide."""
        if self._placing is not None:
            # The adapter or replica was already added: it is served even without a plan.
            self._placing.tick_if_possible()

    # ---- a placement that is given

    @property
    def has_placement(self) -> bool:
        """See Fleet."""
        return self._started().has_placement

    def give(self, given: Mapping[str, Entry]) -> None:
        """See Fleet."""
        self._started().give(given)
        self.place()

    def placed_on(self, version: str) -> Entry | None:
        """See Fleet."""
        return self._started().placed_on(version)

    def waiting(self, version: str) -> list[int]:
        """See Fleet."""
        return self._started().waiting(version)

    def num_bytes(self, version: str) -> int:
        """See Fleet."""
        return self._started().num_bytes(version)

    def _started(self) -> LiveRouting:
        """Return the routing, which there is once the fleet has started."""
        if self._routing is None:
            raise ServerStartingError("the fleet is starting; try again when it serves")
        return self._routing

    # ---- looking after the replicas

    async def _look(self) -> None:
        """Ask replicas periodically which adapters they have, and write the decision log."""
        routing, log = self._routing, self._log
        assert routing is not None
        while True:
            await asyncio.sleep(_LOOK_S)
            # In parallel: a slow replica must not delay the reports of the others.
            await asyncio.gather(*(self._ask(routing, number) for number in self._members.present))
            self._requests.move_stalled()
            self._memory.log(routing)
            if log is not None:
                await asyncio.to_thread(log.write, log.take())
            if routing.has_many_gone or (log is not None and log.is_full):
                events = list(routing.state())  # the routing starts over from its present state
                routing.begin(events)
                if log is not None:
                    log.begin(events)

    async def _ask(self, routing: LiveRouting, number: int) -> None:
        """Record what a replica reports, if it was not replaced while it answered."""
        replica = self._members[number]
        if not replica.healthy:
            return
        try:
            stats = await replica.stats()
        except LoraplexError as error:
            logger.warning("replica %d does not say what it holds: %s", number, error)
            return
        if self._members[number] is replica and replica.healthy:
            routing.saw(number, stats)
            self._members.saw(number, stats)
            self._memory.saw(number, stats)

    async def _watch_failures(self) -> None:
        """Set `failed` when every replica has failed or left."""
        while not self._members.is_gone:
            waits = [asyncio.create_task(replica.failed.wait()) for replica in self._members]
            try:
                # With a timeout, because others may join meanwhile.
                await asyncio.wait(waits, timeout=_LOOK_S, return_when=asyncio.ALL_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        self.failed.set()

    async def scale(self, num_replicas: int, *, move: bool = False) -> None:
        """See `ReplicaChanges.scale`."""
        await self._changes.scale(num_replicas, move=move)

    async def restart(self, number: int, *, move: bool = False) -> None:
        """See `ReplicaChanges.restart`."""
        await self._changes.restart(number, move=move)

    # ---- requests

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See `FleetRequests.generate`."""
        return self._requests.generate(request)

    @property
    def continued(self) -> Counter[Continued]:
        """Counts of requests continued on another replica, by reason."""
        return self._requests.continued

    def is_resampled(self, call_id: str) -> bool:
        """See ServingEngine."""
        return self._requests.is_resampled(call_id)

    def twin(self) -> TwinSubject | None:
        """See `shadow_twin.Shadowed`."""
        info, routing = self.info, self._routing
        if info is None or routing is None:
            return None
        return routing.twin(info, self._requests.recent)

    def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
        """See `waiting.Forecaster`."""
        return self._requests.forecast(adapter, prompt_tokens, admitted)

    # ---- adapters

    async def add_adapter(self, spec: AdapterSpec) -> None:
        """See `FleetAdapters.add`."""
        await self._adapters.add(spec)
        self._members.know(spec.version)
        if self._routing is not None:
            self._routing.add(spec)
            self.place()

    async def stage_adapter(self, version: str) -> None:
        """See `FleetAdapters.stage`."""
        await self._adapters.stage(version)

    def adapter_states(self, version: str) -> list[str]:
        """See Fleet."""
        return self._adapters.states(version)

    def holders(self, version: str) -> list[int]:
        """See Fleet."""
        return self._adapters.holders(version)

    async def remove_adapter(self, version: str) -> None:
        await self._adapters.remove(version)
        self._members.forget(version)

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """See AsyncEngine."""
        self._members.set_tenants(policies)

    async def stats(self) -> EngineStats:
        """Return the sums over all replicas; counters include replicas that have left, and the tier of an
        adapter is the fastest that any replica has it in."""
        members, alive = self._members, self._members.alive()

        async def report(number: int, replica: Replica) -> EngineStats:
            stats = await replica.stats()
            members.saw(number, stats)  # at once: it may be asked again while others answer
            return stats

        each = await asyncio.gather(
            *(report(number, replica) for number, replica in enumerate(members) if replica in alive)
        )
        return await asyncio.to_thread(members.sum_of, each)  # slow with thousands of adapters


def _with_message(status: EngineStatus, message: str | None) -> EngineStatus:
    """Return the status of a replica with one more message, if it serves."""
    if message is None or status.state is not EngineState.READY:
        return status
    return replace(status, message="; ".join(filter(None, (status.message, message))))


async def _kept_up(loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a loop that lasts as long as the fleet, and restart it after an error: without it the fleet would
    keep serving, but nobody would look after adapters, placements or dead replicas, or notice that."""
    while True:
        try:
            return await loop()
        except Exception:
            logger.exception("a part of the fleet's management failed; it is started again")
            await asyncio.sleep(_LOOK_S)
