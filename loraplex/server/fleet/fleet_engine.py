"""Many engines as one: every request goes to the replica that the fleet's router chooses.

A request whose replica dies, or hands it over, goes on at another one from the tokens that it has. Adapters
are known to all replicas; each holds in memory those that it is placed with or asked for (`placing`).
Replicas join, leave and are replaced while others serve; a replica keeps its number, and one that has left
may come back under it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.clock import Clock, MonotonicClock
from loraplex.core.errors import EngineClosedError, InvalidRequestError, LoraplexError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.stats import EngineStats
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.fleet.answer_length import FIRST_GUESS
from loraplex.fleet.policy import Policy
from loraplex.fleet.replanner import PERIOD_S
from loraplex.perf.cost_model import CostModel
from loraplex.perf.profile_json import profile_to_json
from loraplex.server.continuing import Continued
from loraplex.server.engine_status import EngineState, EngineStatus, ReplicaStatus
from loraplex.server.fleet.adapter_memory import AdapterMemory
from loraplex.server.fleet.backend_http import BackendAwayError, BackendError
from loraplex.server.fleet.changes import Changes
from loraplex.server.fleet.decision_log import DecisionLog
from loraplex.server.fleet.fleet_adapters import FleetAdapters
from loraplex.server.fleet.fleet_requests import FleetRequests
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.placing import Placing
from loraplex.server.fleet.revival import RETRY_S, Revival
from loraplex.server.fleet.routing_events import Began, Limits
from loraplex.server.protocol_ipc import Ready, StartProgress
from loraplex.server.replica import Replica
from loraplex.server.shadow_twin import TwinSubject

logger = logging.getLogger(__name__)

MAX_REPLICAS: Final = 64
_LEAVING_S: Final = 0.02
"""How often it is looked whether a replica that leaves has requests left."""
_LOOK_S: Final = 1.0
"""How often replicas are asked which adapters they hold."""
_REST_S: Final = 5.0
"""Longer than a connection to a machine that is gone is waited for, which has a reason of its own."""


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """How the replicas of a fleet are made. `make`: the replica of this number, not started yet. `limits`: of
    one that is ready. `period_s`: of the policy's placement. `costs`: of any of them, as a profile, where
    they do not say it themselves. `most`: how many there can be, and why (None if nothing but good sense
    limits them). `no_restart`: why a replica cannot be restarted on demand, and what to do instead; None if
    it can. `num_loads_at_once`: adapters that one which joins is given at a time. `may_lack`: replicas are
    servers that others start: the fleet starts without those that cannot be used, if one can, and goes on
    trying them. `rest_s`: so long after the first one can be used, it does not wait for the others any more.
    `look`: raises LoraplexError unless the replica of this number could start; asked before one is tried
    again, as starts wait for each other and this need not. `retry_s`: the pause before one that has failed is
    tried again, and the longest. `clock`: that periods go by."""

    make: Callable[[int], Replica]
    limits: Callable[[Ready], Limits]
    policy: Policy
    costs: CostModel
    most: tuple[int, str] | None = None
    no_restart: str | None = None
    period_s: float = PERIOD_S
    num_loads_at_once: int = 4
    may_lack: bool = False
    rest_s: float = _REST_S
    look: Callable[[int], Awaitable[None]] | None = None
    retry_s: tuple[float, float] = RETRY_S
    clock: Clock = field(default_factory=MonotonicClock)


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
        self._changes = Changes()  # replicas that join or leave
        self._revival = Revival(
            self._members,
            setup.clock,
            self._start_anew,
            setup.retry_s,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self.failed = asyncio.Event()
        self.info: Ready | None = None

    # ---- its life

    async def start(
        self,
        on_progress: Callable[[StartProgress], None] | None = None,
        add_adapters: Awaitable[object] | None = None,
    ) -> None:
        """See SupervisedEngine. Progress is that of the first replica: all do the same side by side."""
        adding = None if add_adapters is None else asyncio.ensure_future(add_adapters)
        usable = _Usable()
        starts = [
            asyncio.create_task(
                replica.start(
                    on_progress if number == 0 else None,
                    None if adding is None else _Deferred(partial(usable.wait_for, number, adding)),
                )
            )
            for number, replica in enumerate(self._members)
        ]
        try:
            await self._started(starts, usable)
        except BaseException as error:
            self._adapters.start_error = error if isinstance(error, Exception) else None
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise
        finally:
            self._adapters.start_ended.set()
        infos = [replica.info for replica in self._members if replica.info is not None]
        self.info = Ready(
            num_kv_blocks=sum(info.num_kv_blocks or 0 for info in infos) or None,
            max_model_len=min(info.max_model_len for info in infos),
            load_s=max(info.load_s for info in infos),
            costs=infos[0].costs,
        )
        setup = self._setup
        began = Began(
            policy=setup.policy.name,
            # One that is not there yet joins with limits of its own.
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
        self._requests.routing = self._adapters.routing = self._routing
        for spec in self._adapters.specs():
            self._routing.add(spec)
        self._placing = Placing(self._routing, self._members, self._requests, setup.clock)
        self._placing.tick()
        self._memory.log(self._routing)
        loops = (self._look, self._watch_failures, self._revival.run, self._placing.run)
        self._tasks = [asyncio.create_task(_kept_up(loop)) for loop in loops]

    async def _started(self, starts: Sequence[asyncio.Task[None]], usable: _Usable) -> None:
        """Wait until all replicas have started, or those that do if the fleet may lack the others. Raises
        what the first one raises that the fleet does not start without; if none has started that it may lack,
        what is wrong with each."""
        if not self._setup.may_lack:
            await asyncio.gather(*starts)
            return
        late = await self._give_up_late(starts, usable)
        results = await asyncio.gather(*starts, return_exceptions=True)
        errors: dict[int, LoraplexError] = {}
        for number, result in enumerate(results):
            if isinstance(result, LoraplexError):
                errors[number] = result
            elif isinstance(result, asyncio.CancelledError) and number in late:
                errors[number] = BackendAwayError(late[number])
            elif result is not None:
                raise result
        if len(errors) == len(starts):
            raise _none_started(list(errors.values()))
        for number, error in errors.items():
            self._revival.plan(number, str(error))
            logger.warning(
                "the fleet starts without replica %d, which is asked again in %g s, and then ever more "
                "rarely: %s",
                *(number, self._setup.retry_s[0], error),
            )

    async def _give_up_late(self, starts: Sequence[asyncio.Task[None]], usable: _Usable) -> dict[int, str]:
        """Cancel the starts of those that are not usable some time after the first one is; return why. No
        adapter would be added before, as that waits for all that start."""
        first = asyncio.create_task(usable.first.wait())
        pending: set[asyncio.Task[Any]] = set(starts)
        try:
            # One that needs no adapters is usable when it has started.
            while pending and not first.done() and not any(map(_has_started, starts)):
                done, _ = await asyncio.wait([*pending, first], return_when=asyncio.FIRST_COMPLETED)
                pending -= done
        finally:
            first.cancel()
        if waited_for := [start for number, start in enumerate(starts) if number not in usable.numbers]:
            await asyncio.wait(waited_for, timeout=self._setup.rest_s)
        late: dict[int, str] = {}
        for number, start in enumerate(starts):
            if not start.done() and number not in usable.numbers:
                message = self._members[number].status.message
                late[number] = f"{message}, and has not answered for {self._setup.rest_s:g} s"
                start.cancel()
        return late

    async def _device_bytes(self) -> int | None:
        """Return the memory that adapters share with the KV cache on every replica."""
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
        """See `Members.drain`. The replica finishes the requests it has. `move`: others go on with them."""
        self._members.drain(number)
        if move:
            self._members[number].hand_over()

    def undrain(self, number: int) -> None:
        self._members.undrain(number)

    def place(self) -> None:
        """Decide now where adapters live and which requests move, if there is anything to decide."""
        if self._placing is not None:
            # Who adds an adapter, or a replica, has done so: without a plan it is served all the same.
            self._placing.tick_if_possible()

    async def _look(self) -> None:
        """Ask replicas again and again which adapters they hold, and write down what was decided."""
        routing, log = self._routing, self._log
        assert routing is not None
        while True:
            await asyncio.sleep(_LOOK_S)
            # Side by side: one that is slow to answer must not age what is known of the others.
            await asyncio.gather(*(self._ask(routing, number) for number in self._members.present))
            self._requests.move_stalled()
            self._memory.log(routing)
            if log is not None:
                await asyncio.to_thread(log.write, log.take())
            if routing.has_many_gone or (log is not None and log.is_full):
                events = list(routing.state())  # it begins anew with what is known
                routing.begin(events)
                if log is not None:
                    log.begin(events)

    async def _ask(self, routing: LiveRouting, number: int) -> None:
        """Take over what a replica says to hold, if it is the same one when it has answered."""
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
        """The fleet has failed when every replica has, or has left."""
        while not self._members.is_gone:
            waits = [asyncio.create_task(replica.failed.wait()) for replica in self._members]
            try:
                # Not for ever: others may join meanwhile.
                await asyncio.wait(waits, timeout=_LOOK_S, return_when=asyncio.ALL_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        self.failed.set()

    # ---- replicas that join and leave

    async def scale(self, num_replicas: int, *, move: bool = False) -> None:
        """Have so many replicas; return when they serve. Those with the highest numbers leave, after the
        requests they have. `move`: others go on with these.

        Raises InvalidRequestError for a number that cannot be, and LoraplexError if a new one cannot start;
        those that serve go on.
        """
        self._check_size(num_replicas)
        await self._changes.run(self._scale(num_replicas, move=move))

    async def _scale(self, num_replicas: int, *, move: bool) -> None:
        present = self._members.present
        missing = [number for number in range(num_replicas) if number not in present]
        for number in missing[: max(num_replicas - len(present), 0)]:
            await self._join(number)
        try:
            with self._members.leaving(present[num_replicas:]) as leaving:
                await asyncio.gather(*(self._leave(number, move=move) for number in leaving))
        finally:
            # Not before: one that had failed may have been planned again until it was closed.
            self._revival.forget()

    async def restart(self, number: int, *, move: bool = False) -> None:
        """Replace a replica by a new one, after the requests it has; the others serve meanwhile. `move`: they
        go on with these requests.

        Raises as `drain` does, also if replicas of this fleet cannot be restarted by it, and LoraplexError
        if the new one cannot start; that is tried again later.
        """
        self._members.check_there(number)
        if (why := self._setup.no_restart) is not None:
            raise InvalidRequestError(f"replica {number} is not restarted: {why}", param="replica")
        await self._changes.run(self._restart(number, move=move))

    async def _restart(self, number: int, *, move: bool) -> None:
        was_drained = self._members.is_drained(number)
        with self._members.replacing(number):
            with self._members.leaving([number]):
                await self._leave(number, move=move)
            try:
                await self._join(number)
            except EngineClosedError:
                raise
            except LoraplexError as error:
                self._revival.plan(number, str(error))
                raise LoraplexError(
                    f"replica {number} has left, and the new one did not start: {error}; it is tried again "
                    "from time to time, and at once by `loraplex fleet scale` with the number of replicas "
                    "that there are to be"
                ) from error
        if was_drained:
            self._members.drain(number)

    async def _start_anew(self, number: int) -> None:
        """Start a replica anew when it is its turn. A server is looked at before that: one that accepts
        connections and stays silent must not hold up others, nor whoever changes the fleet."""
        if (look := self._setup.look) is not None:
            try:
                await look(number)
            except LoraplexError as error:
                if self._revival.is_planned(number):  # else somebody has decided otherwise meanwhile
                    if self._members.lost.get(number) != str(error):
                        logger.warning("replica %d cannot join the fleet yet: %s", number, error)
                    self._revival.plan(number, str(error))
                raise
        await self._changes.run(self._revive(number))

    async def _revive(self, number: int) -> None:
        """Start a replica anew, unless somebody has decided otherwise before it had its turn."""
        if self._revival.is_planned(number):
            await self._restart(number, move=False)

    async def _join(self, number: int) -> None:
        """Start a replica with all adapters, and send it requests."""
        routing = self._routing
        assert routing is not None
        replica = self._setup.make(number)
        joining = self._adapters.joining(replica, self._setup.num_loads_at_once)
        try:
            await replica.start(None, _Deferred(joining.catch_up))
            await joining.catch_up()  # with what came while it got ready
        except BaseException as error:
            if isinstance(error, Exception):  # also for the log: who asked for it may have left
                logger.error("replica %d could not join the fleet: %s; the others serve on", number, error)
            await replica.close()
            raise
        # Nobody has had a turn since it was up to date.
        assert replica.info is not None
        self._members.put(number, replica)
        routing.join(number, self._setup.limits(replica.info))
        self.place()

    async def _leave(self, number: int, *, move: bool) -> None:
        """Close a replica that is drained, after its requests."""
        assert self._routing is not None
        while self._routing.num_in_flight(number):
            if move:  # again and again: some may have waited for it to be ready
                self._members[number].hand_over()
            await asyncio.sleep(_LEAVING_S)
        await self._members[number].close()
        self._memory.forget(number)

    def _check_size(self, num_replicas: int) -> None:
        most, why = self._setup.most or (MAX_REPLICAS, "more are not managed by one front")
        if num_replicas < 1:
            raise InvalidRequestError("a fleet has one replica at least", param="replicas")
        if num_replicas > most:
            raise InvalidRequestError(f"there can be {most} replicas at most: {why}", param="replicas")

    # ---- requests

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See `FleetRequests.generate`."""
        return self._requests.generate(request)

    @property
    def continued(self) -> Counter[Continued]:
        """How often requests went on at another replica, by reason."""
        return self._requests.continued

    def is_resampled(self, call_id: str) -> bool:
        """See ServingEngine."""
        return self._requests.is_resampled(call_id)

    def twin(self) -> TwinSubject | None:
        """See `shadow_twin.Shadowed`."""
        info, routing = self.info, self._routing
        if info is None or info.costs is None or routing is None:
            return None
        return routing.twin(info.costs, self._requests.recent)

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

    async def stats(self) -> EngineStats:
        """Return the sums over all replicas, and of counters those of replicas that have left as well; an
        adapter is where it is nearest to its use."""
        members, alive = self._members, self._members.alive()

        async def report(number: int, replica: Replica) -> EngineStats:
            stats = await replica.stats()
            members.saw(number, stats)  # at once: while others answer, it may be asked again
            return stats

        each = await asyncio.gather(
            *(report(number, replica) for number, replica in enumerate(members) if replica in alive)
        )
        return await asyncio.to_thread(members.sum_of, each)  # long with thousands of adapters


class _Deferred:
    """A coroutine that is made when it is awaited: a start that fails before that leaves none behind."""

    def __init__(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._function = function

    def __await__(self) -> Generator[Any, None, None]:
        return self._function().__await__()


class _Usable:
    """The replicas that have begun to take adapters, by number. `first`: one of them has."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.first = asyncio.Event()

    async def wait_for(self, number: int, adding: asyncio.Future[object]) -> None:
        """Wait for the adapters on behalf of a replica, which takes them from now on."""
        self.numbers.add(number)
        self.first.set()
        await _finished(adding)


def _has_started(start: asyncio.Task[None]) -> bool:
    return start.done() and not start.cancelled() and start.exception() is None


def _none_started(errors: Sequence[LoraplexError]) -> LoraplexError:
    """Return one error for servers of which none can be used: what is wrong with each, first with those that
    have said so themselves."""
    telling = sorted(errors, key=lambda error: isinstance(error, BackendAwayError))
    reasons = list(dict.fromkeys(map(str, telling)))
    if len(reasons) == 1:
        return telling[0]
    each = "; ".join(f"({number}) {reason}" for number, reason in enumerate(reasons, start=1))
    return BackendError(f"none of the {len(errors)} servers can be used: {each}")


def _with_message(status: EngineStatus, message: str | None) -> EngineStatus:
    """Return the status of a replica with one message more, if it serves."""
    if message is None or status.state is not EngineState.READY:
        return status
    return replace(status, message="; ".join(filter(None, (status.message, message))))


async def _kept_up(loop: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run something that lasts as long as the fleet, again after an error: without it the fleet would serve
    on, but adapters, plans or dead replicas would be looked after by nobody, and nobody would know."""
    while True:
        try:
            return await loop()
        except Exception:
            logger.exception("a part of the fleet's management failed; it is started again")
            await asyncio.sleep(_LOOK_S)


async def _finished(task: asyncio.Future[object]) -> None:
    """Wait for a task that others wait for as well: who stops waiting does not end it."""
    await asyncio.wait([task])
    task.result()
