"""Requests of a fleet: each is sent to the replica that the router chooses, and continued on another one if
that one dies or hands it over, or if the request migrates."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from loraplex.core.clock import Clock, MonotonicClock
from loraplex.core.continuation import continued, request_id_of
from loraplex.core.errors import EngineClosedError, EngineDeadError, RequestMovedError, UnknownModelError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.server.continuing import Attempt, Continued, Serving, continuing
from loraplex.server.engine_status import EngineState
from loraplex.server.fleet.backend_errors import AdapterMissingError, BackendBusyError, NotAcceptedError
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.request_report import RequestReport
from loraplex.server.fleet.routing_events import Moved, call_id_of
from loraplex.server.recent_requests import RecentRequests
from loraplex.server.replica import Continuation

logger = logging.getLogger(__name__)

_MAX_IN_A_ROW: Final = 3
"""Number of replicas that may die or fall silent with a request, without a token of it in between, before it
is given up: it may be the cause."""
_MAX_DEATHS_IN_ALL: Final = 10
_MAX_WAIT_S: Final = 180.0
"""Seconds that a request waits for a replica that takes it, if none serves or each goes away first."""
_MAX_DROPPED_S: Final = 15.0
"""The same limit in seconds while all available replicas answer but drop requests."""
_LOOK_S: Final = 0.05
"""Seconds between two attempts of a waiting request to find a replica."""
_BUSY_S: Final = 0.5
"""Seconds to wait before a request that a replica had no room for is sent to another one."""
_MAX_RESAMPLED: Final = 4096
"""Number of calls remembered as resampled: more than are ever open or were just answered."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A request on its present replica."""

    request: EngineRequest
    replica: int
    report: RequestReport
    course: _Course


@dataclass(slots=True)
class _Course:
    """The history of a request so far. `tried`: the replicas that have lost or refused it. `is_admitted`: a
    replica has accepted it, so no other may refuse it any more. `waits_since_s`: since when it waits for a
    replica to take it; None if one has. `problem`: the error of the last replica that did not. `stalled_on`:
    the replicas that it has stalled on since its last token. `has_prompt_logprobs`: they were received, and
    are not requested again."""

    is_admitted: bool
    waits_since_s: float | None = None
    problem: str = ""
    tried: set[int] = field(default_factory=set)
    stalled_on: set[int] = field(default_factory=set)
    has_prompt_logprobs: bool = False


def _rest_of(found: _InFlight) -> EngineRequest:
    """Return the request as another replica would get it, to ask whether that replica can continue it: this
    depends on whether there are output tokens, not on which."""
    had = (0,) if found.report.num_output else ()
    return continued(found.request, had, has_prompt_logprobs=found.course.has_prompt_logprobs)


class FleetRequests:
    """Runs requests on the members of a fleet. `routing`: None until the fleet has started. `is_closing`: the
    whole fleet is being closed, not a single replica."""

    def __init__(self, members: Members, clock: Clock | None = None) -> None:
        self._members = members
        self._clock = clock or MonotonicClock()
        self._in_flight: dict[str, _InFlight] = {}  # by the first id, which stays the same
        self._targets: dict[str, int] = {}  # replicas that requests being moved continue on
        self._resampled: dict[str, None] = {}  # calls, the latest last
        self.routing: LiveRouting | None = None
        self.is_closing = False
        self.recent = RecentRequests()
        self.continued: Counter[Continued] = Counter()
        self.num_migrated: Counter[int] = Counter()
        """Number of requests that migrated to each replica."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See AsyncEngine. Raises EngineDeadError only if too many replicas died with the request, if none is
        left or none takes it for too long, or if none that is left could continue it like the one that
        died."""
        # A request that began elsewhere was admitted there.
        course = _Course(is_admitted=bool(request.output_token_ids))

        async def give(attempt: EngineRequest) -> Serving:
            await self._wait_for_replica(attempt.adapter, course)
            routing, number = self._choose(attempt, course.tried)
            return self._serving(routing, number, attempt, course)

        return continuing(
            request,
            give,
            max_in_a_row=_MAX_IN_A_ROW,
            max_in_all=_MAX_DEATHS_IN_ALL,
            engines="replicas",
            continued=self.continued,
        )

    async def _wait_for_replica(self, adapter: str | None, course: _Course) -> None:
        """Wait until any replica serves. Raises EngineDeadError if none will, or if that takes too long."""
        if self.routing is None:
            return
        if course.waits_since_s is None:
            course.waits_since_s = self._clock.now_s()
        while True:
            accepts = self._members.accepting(adapter)
            takers = [self._members[number] for number, accepted in enumerate(accepts) if accepted]
            is_dropped = all(replica.status.is_dropping for replica in takers)
            limit_s = _MAX_DROPPED_S if is_dropped else _MAX_WAIT_S
            if self._clock.now_s() - course.waits_since_s > limit_s:
                problem = takers[0].status.message if is_dropped else course.problem
                problem = problem or self._members.status.message
                raise EngineDeadError(
                    f"no replica took the request within {limit_s:g} s ({problem}); send it again"
                )
            if any(replica.healthy for replica in takers):
                return
            await asyncio.sleep(_LOOK_S)

    def num_output(self) -> dict[str, int]:
        """Return the number of tokens that each request has from its present replica."""
        return {name: each.report.num_output for name, each in self._in_flight.items()}

    def move(self, moves: Sequence[Moved]) -> list[Moved]:
        """Move requests to other replicas; return the moves that were started. A request stays if it has
        ended or is not on the source, if its target is gone or would continue it differently, or if its
        replica cannot hand it over right now."""
        self._targets.clear()  # earlier moves are done, or never will be
        accepts = self._members.accepting()
        made = []
        for move in moves:
            found = self._in_flight.get(move.request_id)
            if found is None or found.replica != move.source or not accepts[move.target]:
                continue
            if found.request.adapter in self._members[move.target].refused:
                continue
            if self._continuation(_rest_of(found), move.target) is not Continuation.SAME:
                continue
            self._targets[move.request_id] = move.target
            self._members[move.source].hand_over(found.request.request_id)
            made.append(move)
        return made

    def move_stalled(self) -> None:
        """Move stalled requests to other replicas, to each replica that can take it at most once. If no such
        replica is left they wait: the silence may end. They also wait, rather than continue with new random
        draws, while the replica computes other requests. Stagings are ended: their waiters may do without the
        replica."""
        for number in self._members.present:
            replica = self._members[number]
            if not (stalled := replica.stalled):
                continue
            wanted = {Continuation.SAME} if replica.computes else {Continuation.SAME, Continuation.RESAMPLED}
            handed_over = []
            for request_id in stalled:
                found = self._in_flight.get(request_id_of(request_id))
                if found is None:
                    handed_over.append(request_id)
                    continue
                if found.request.request_id != request_id:
                    continue
                course = found.course
                if not self._others(found, wanted) - course.stalled_on:
                    continue
                course.stalled_on.add(number)
                course.tried = set(course.stalled_on)  # replicas that lost it before may continue it now
                course.waits_since_s = None  # until now it had a replica
                logger.warning(
                    "request %s has stalled on replica %d, which says that it is well but sends nothing",
                    *(request_id, number),
                )
                handed_over.append(request_id)
            if handed_over:
                replica.hand_over_stalled(handed_over)

    def _others(self, found: _InFlight, wanted: Set[Continuation]) -> set[int]:
        """Return the replicas that could continue another replica's request now, in one of the wanted
        ways."""
        members, rest = self._members, _rest_of(found)
        return {
            number
            for number in members.serving
            if number != found.replica
            and found.request.adapter not in members[number].refused
            and self._continuation(rest, number) in wanted
        }

    def _continuation(self, rest: EngineRequest, number: int) -> Continuation:
        """Return how a replica would continue the rest of a request."""
        return self._members[number].continuation(rest) if rest.output_token_ids else Continuation.SAME

    @asynccontextmanager
    async def _serving(
        self, routing: LiveRouting, number: int, request: EngineRequest, course: _Course
    ) -> AsyncIterator[Attempt]:
        """Yield an attempt: the request on a replica."""
        members, name = self._members, request_id_of(request.request_id)
        members.num_replayed[number] += course.is_admitted and bool(course.tried)
        course.tried.add(number)
        report = RequestReport(request, number, routing, self.recent)
        self._in_flight[name] = _InFlight(request, number, report, course)

        def saw(output: EngineOutput) -> None:
            course.is_admitted = True
            course.waits_since_s = None
            if output.token_ids and course.stalled_on:
                course.stalled_on.clear()
            if output.prompt_logprobs is not None:
                course.has_prompt_logprobs = True
            if output.adapter_hit and output.token_ids and not report.num_output:
                members.num_hits[number] += 1
            report.saw(output)

        try:
            async with members[number].open(request) as take:
                yield Attempt(take, saw)
        except EngineClosedError as error:
            if self.is_closing:
                raise
            course.is_admitted = True
            raise RequestMovedError(f"replica {number} is shutting down ({error})") from error
        except AdapterMissingError as error:
            error.is_last = self._all_refuse(request.adapter, course.tried)
            raise
        except NotAcceptedError as error:
            course.problem = str(error)
            if course.tried.issuperset(members.serving):
                await asyncio.sleep(_BUSY_S)
            raise
        except EngineDeadError:
            course.is_admitted = True
            raise
        except BackendBusyError as error:
            if course.is_admitted:
                await asyncio.sleep(_BUSY_S)
            elif course.tried.issuperset(members.serving):
                raise  # all others have refused it as well
            raise RequestMovedError(f"replica {number} has no room for it ({error})") from error
        finally:
            report.close()
            del self._in_flight[name]

    def _all_refuse(self, adapter: str | None, tried: Set[int]) -> bool:
        """Return whether all replicas that take requests, now or later, refuse an adapter and were just asked
        for it."""
        try:
            accepts = self._members.accepting(adapter)
        except EngineDeadError:
            return False  # there is no replica, which is reported instead
        takers = [number for number, each in enumerate(accepts) if each]
        return all(number in tried and adapter in self._members[number].refused for number in takers)

    def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
        """See `waiting.Forecaster`."""
        routing = self.routing
        if routing is None:
            return None
        try:
            self._let_accept(routing, self._members.accepting(adapter))
            return routing.forecast(adapter, prompt_tokens, admitted)
        except (EngineDeadError, UnknownModelError):
            return None  # the request itself will get the error

    def _choose(self, request: EngineRequest, failed: Set[int]) -> tuple[LiveRouting, int]:
        """Return the routing and the number of a replica, to whose load the request belongs from now on.
        Replicas that lost it are chosen only if there is no other."""
        routing, name = self.routing, request.request_id
        if routing is None:
            raise EngineDeadError("the fleet is starting; send the request again")
        accepts = self._members.accepting(request.adapter)
        target = self._targets.pop(request_id_of(request.request_id), None)
        if target is not None and accepts[target]:
            routing.route(name, request.adapter, request.num_tokens, to=target, tenant=request.tenant)
            self._members.sent(target)
            self.num_migrated[target] += 1
            return routing, target
        able = self._able_to_continue(request, accepts) if request.output_token_ids else accepts
        others = [each and number not in failed for number, each in enumerate(able)]
        takers = others if any(others) else able
        rejected = {
            number: self._why_not(number, request.adapter, accepts=accepts[number], is_able=able[number])
            for number, each in enumerate(takers)
            if not each
        }
        self._let_accept(routing, takers)
        number = routing.route(
            name, request.adapter, request.num_tokens, rejected=rejected, tenant=request.tenant
        )
        self._members.sent(number)
        return routing, number

    def _why_not(self, number: int, adapter: str | None, *, accepts: bool, is_able: bool) -> str:
        """Return why a request is not sent to a replica. `accepts`: it takes requests for the adapter;
        `is_able`: it could continue this one."""
        if accepts:
            return "had the request before" if is_able else "cannot go on with its answer"
        replica = self._members[number]
        state = self._members.state(number)
        if state is EngineState.CLOSED:
            return "has left"
        if state is not EngineState.READY:
            return str(state)
        if number not in self._members.serving:
            return "drained" if self._members.is_drained(number) else "leaving"
        return "refuses the adapter" if adapter in replica.refused else "takes no requests"

    @staticmethod
    def _let_accept(routing: LiveRouting, accepts: list[bool]) -> None:
        for number, accepts_now in enumerate(accepts):
            routing.accept(number, accepts=accepts_now)

    def _able_to_continue(self, request: EngineRequest, accepts: list[bool]) -> list[bool]:
        """Return which of the accepting replicas can continue the request best: unchanged if any can, else
        resampled.

        Raises EngineDeadError if none can.
        """
        found = {n: self._members[n].continuation(request) for n, each in enumerate(accepts) if each}
        for wanted in (Continuation.SAME, Continuation.RESAMPLED):
            if wanted in found.values():
                if wanted is Continuation.RESAMPLED:
                    self._note_resampled(request)
                return [found.get(number) is wanted for number in range(len(accepts))]
        why = (
            "a presence or frequency penalty would not count the answer so far there"
            if request.params.prompt_logprobs is None
            else "the log-probabilities of its prompt would come with those of the answer so far there"
        )
        raise EngineDeadError(
            f"the replica of this request is gone, and no other one can go on where it was: {why}; send the "
            "request again"
        )

    def _note_resampled(self, request: EngineRequest) -> None:
        logger.warning("request %s goes on with new draws, not by its seed", request.request_id)
        self._resampled[call_id_of(request.request_id)] = None
        if len(self._resampled) > _MAX_RESAMPLED:
            del self._resampled[next(iter(self._resampled))]

    def is_resampled(self, call_id: str) -> bool:
        """See ServingEngine."""
        return call_id in self._resampled
