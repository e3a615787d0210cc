"""Many engines as one: every request goes to the replica that the fleet's router chooses.

A request whose replica dies before it has answered anything is sent to another one unseen. Adapters are
known to all replicas; each holds in memory what it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Final, cast

from loraplex.adapters.spec import AdapterSpec
from loraplex.core.errors import EngineClosedError, EngineDeadError, InvalidRequestError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.server.engine_status import EngineState, EngineStatus, ReplicaStatus
from loraplex.server.fleet.decision_log import DecisionLog
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.routing_events import Began
from loraplex.server.protocol_ipc import Ready, StartProgress
from loraplex.server.supervised_engine import SupervisedEngine

logger = logging.getLogger(__name__)

_MAX_DEATHS: Final = 3
"""As many replicas may die with a request before it is given up: it may be what they die of."""
_LOOK_S: Final = 1.0
"""How often replicas are asked which adapters they hold."""
_TIERS: Final = ("disk", "host", "loading", "device")
"""Where an adapter may be, the nearest to its use last."""
_ON_ITS_WAY: Final = (EngineState.STARTING, EngineState.RESTARTING)


class FleetEngine:
    """A SupervisedEngine made of replicas, which are SupervisedEngines themselves."""

    def __init__(
        self,
        replicas: Sequence[SupervisedEngine],
        begin: Callable[[Sequence[Ready]], Began],
        log: DecisionLog | None = None,
    ) -> None:
        """`begin`: called when all replicas are ready, with what each said of itself; returns what the
        routing begins with. `log`: where its decisions are written."""
        self._replicas = replicas
        self._begin = begin
        self._log = log
        self._routing: LiveRouting | None = None
        self._specs: dict[str, AdapterSpec] = {}  # by version
        self._num_sent: Counter[int] = Counter()
        self._drained: set[int] = set()
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
        starts = [
            asyncio.create_task(
                replica.start(
                    on_progress if number == 0 else None, None if adding is None else _finished(adding)
                )
            )
            for number, replica in enumerate(self._replicas)
        ]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        self.info = Ready(
            num_kv_blocks=sum(info.num_kv_blocks for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
            load_s=max(info.load_s for info in infos),
        )
        began = self._begin(infos)
        if self._log is not None:
            self._log.begin([began])
        self._routing = LiveRouting([began], None if self._log is None else self._log.record)
        for spec in self._specs.values():
            self._routing.add(spec)
        self._tasks = [asyncio.create_task(self._look()), asyncio.create_task(self._watch_failures())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(replica.close() for replica in self._replicas))
        if self._log is not None:
            await asyncio.to_thread(self._log.write, self._log.take())

    @property
    def healthy(self) -> bool:
        return any(replica.healthy for replica in self._replicas)

    @property
    def status(self) -> EngineStatus:
        """Ready while any replica is; otherwise what is known of the one that is nearest to it."""
        each = [replica.status for replica in self._replicas]
        ready = [status for status in each if status.state is EngineState.READY]
        on_its_way = [status for status in each if status.state in _ON_ITS_WAY]
        shown = (ready or on_its_way or each)[0]
        message = shown.message
        if ready and len(ready) < len(each):
            message = f"{len(ready)} of {len(each)} replicas are ready"
        return EngineStatus(
            state=shown.state,
            message=message,
            num_restarts=sum(status.num_restarts for status in each),
            pid=None,
            phase=shown.phase,
            fraction=shown.fraction,
        )

    @property
    def replicas(self) -> list[ReplicaStatus]:
        routing = self._routing
        return [
            ReplicaStatus(
                number=number,
                status=replica.status,
                num_in_flight=0 if routing is None else routing.num_in_flight(number),
                num_sent=self._num_sent[number],
                drained=number in self._drained,
            )
            for number, replica in enumerate(self._replicas)
        ]

    def drain(self, number: int) -> None:
        """Send a replica no more requests; it finishes those it has.

        Raises InvalidRequestError for a replica that is not there, and for the last one that is not drained.
        """
        self._check_number(number)
        if len(self._drained | {number}) == len(self._replicas):
            raise InvalidRequestError(
                f"replica {number} is the last one that takes requests; undrain another one first",
                param="replica",
            )
        self._drained.add(number)

    def undrain(self, number: int) -> None:
        """Send a replica requests again. Raises InvalidRequestError for a replica that is not there."""
        self._check_number(number)
        self._drained.discard(number)

    def _check_number(self, number: int) -> None:
        if not 0 <= number < len(self._replicas):
            last = len(self._replicas) - 1
            raise InvalidRequestError(
                f"there is no replica {number}; they have the numbers 0 to {last}", param="replica"
            )

    async def _look(self) -> None:
        """Ask replicas again and again which adapters they hold, and write down what was decided."""
        routing, log = self._routing, self._log
        assert routing is not None
        while True:
            await asyncio.sleep(_LOOK_S)
            for number, replica in enumerate(self._replicas):
                if replica.healthy:
                    routing.saw(number, await replica.stats())
            if log is not None:
                await asyncio.to_thread(log.write, log.take())
                if log.is_full:
                    events = list(routing.state())
                    routing.begin(events)
                    log.begin(events)

    async def _watch_failures(self) -> None:
        """The fleet has failed when all of its replicas have."""
        await asyncio.gather(*(replica.failed.wait() for replica in self._replicas))
        self.failed.set()

    # ---- requests

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See AsyncEngine. EngineDeadError only if the replica died in the middle of the answer, or if none
        is left."""
        was_queued = False
        for num_deaths in range(1, _MAX_DEATHS + 1):
            routing, number = self._choose(request)
            answer = _Answer(routing, request.request_id, self._replicas[number].generate(request))
            try:
                async with aclosing(answer.outputs()) as outputs:
                    async for output in outputs:
                        if output.token_ids or output.finish_reason is not None or not was_queued:
                            was_queued = True
                            yield output
                return
            except EngineClosedError:
                raise
            except EngineDeadError as error:
                if answer.num_tokens:
                    raise
                if num_deaths == _MAX_DEATHS:
                    raise EngineDeadError(
                        f"{num_deaths} replicas died one after the other while they had this request; it may "
                        "be the reason, so it is not sent to another one"
                    ) from error
                logger.warning("request %s is sent to another replica: %s", request.request_id, error)

    def _choose(self, request: EngineRequest) -> tuple[LiveRouting, int]:
        """Return the number of a replica, which has the request as its load from now on in this routing."""
        routing = self._routing
        if routing is None:
            raise EngineDeadError("the fleet is starting; send the request again")
        open_to_all = [number not in self._drained for number in range(len(self._replicas))]
        accepts = [
            replica.healthy and is_open for replica, is_open in zip(self._replicas, open_to_all, strict=True)
        ]
        if not any(accepts):  # whoever comes back first serves it
            accepts = [
                replica.status.state in _ON_ITS_WAY and is_open
                for replica, is_open in zip(self._replicas, open_to_all, strict=True)
            ]
        if not any(accepts):
            state = self.status
            error = EngineClosedError if state.state is EngineState.CLOSED else EngineDeadError
            raise error(state.message)
        for number, accepts_now in enumerate(accepts):
            routing.accept(number, accepts=accepts_now)
        number = routing.route(request.request_id, request.adapter, len(request.prompt_token_ids))
        self._num_sent[number] += 1
        return routing, number

    # ---- adapters

    async def add_adapter(self, spec: AdapterSpec) -> None:
        """See AsyncEngine: on all replicas, or on none of them."""
        results = await asyncio.gather(
            *(replica.add_adapter(spec) for replica in self._replicas), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            if spec.version not in self._specs:
                await asyncio.gather(
                    *(replica.remove_adapter(spec.version) for replica in self._replicas),
                    return_exceptions=True,
                )
            # What the adapter is refused for tells more than that a replica died meanwhile.
            raise next((error for error in errors if not isinstance(error, EngineDeadError)), errors[0])
        self._specs[spec.version] = spec
        if self._routing is not None:
            self._routing.add(spec)

    async def remove_adapter(self, version: str) -> None:
        self._specs.pop(version, None)
        results = await asyncio.gather(
            *(replica.remove_adapter(version) for replica in self._replicas), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def stats(self) -> EngineStats:
        """Return the sums over all replicas; an adapter is where it is nearest to its use."""
        return _sum(await asyncio.gather(*(replica.stats() for replica in self._replicas)))


class _Answer:
    """One request on one replica, reported to the routing from its first token to its end."""

    def __init__(self, routing: LiveRouting, request_id: str, source: AsyncIterator[EngineOutput]) -> None:
        self._routing = routing
        self._source = source
        self._request_id = request_id
        self.num_tokens = 0

    async def outputs(self) -> AsyncGenerator[EngineOutput, None]:
        served: int | None = None
        try:
            async with aclosing(cast("AsyncGenerator[EngineOutput, None]", self._source)) as outputs:
                async for output in outputs:
                    if output.token_ids and not self.num_tokens:
                        self._routing.first_token(self._request_id)
                    self.num_tokens += len(output.token_ids)
                    if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                        served = max(self.num_tokens, 1)
                    yield output
        finally:
            self._routing.ended(self._request_id, served)


async def _finished(task: asyncio.Future[object]) -> None:
    """Wait for a task that others wait for as well: who stops waiting does not end it."""
    await asyncio.wait([task])
    task.result()


def _sum(each: Sequence[EngineStats]) -> EngineStats:
    adapters: dict[str, AdapterStats] = {}
    for stats in each:
        for adapter in stats.adapters:
            adapters[adapter.version] = _merged(adapters.get(adapter.version), adapter)
    numbers = [field for field in EngineStats.__dataclass_fields__ if field != "adapters"]
    return EngineStats(
        **{name: sum(getattr(stats, name) for stats in each) for name in numbers},
        adapters=tuple(adapters.values()),
    )


def _merged(one: AdapterStats | None, other: AdapterStats) -> AdapterStats:
    if one is None:
        return other
    return AdapterStats(
        version=one.version,
        tier=max(one.tier, other.tier, key=_TIERS.index),
        num_bytes=one.num_bytes + other.num_bytes,
        in_flight=one.in_flight + other.in_flight,
        loads=one.loads + other.loads,
    )
