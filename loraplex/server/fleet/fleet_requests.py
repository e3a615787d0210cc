"""Requests of a fleet: each is sent to the replica that the router chooses, and goes on at another one if
that one dies or hands it over, or if it migrates."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence, Set
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Final, cast

from loraplex.core.continuation import request_id_of
from loraplex.core.errors import EngineClosedError, EngineDeadError, RequestMovedError, UnknownModelError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.fleet.admission import Admitted, Forecast
from loraplex.server.continuing import Attempt, Continued, Outputs, Serving, continuing
from loraplex.server.fleet.backend_errors import AdapterMissingError, BackendBusyError
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.members import Members
from loraplex.server.fleet.request_report import RequestReport
from loraplex.server.fleet.routing_events import Moved
from loraplex.server.recent_requests import RecentRequests
from loraplex.server.replica import Continuation

logger = logging.getLogger(__name__)

_MAX_DEATHS: Final = 3
"""As many replicas may die with a request before it is given up: it may be what they die of."""
_BUSY_S: Final = 0.5
"""After so long, another replica is asked to go on with a request that one had no room for."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A request on the replica that has it."""

    request: EngineRequest
    replica: int
    report: RequestReport


class FleetRequests:
    """Runs requests on the members of a fleet. `routing`: None until the fleet has started. `is_closing`: a
    replica that is closed is closed with the fleet."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._in_flight: dict[str, _InFlight] = {}  # by the first id, which stays
        self._targets: dict[str, int] = {}  # where requests go on that are being moved
        self.routing: LiveRouting | None = None
        self.is_closing = False
        self.recent = RecentRequests()
        self.continued: Counter[Continued] = Counter()

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """See AsyncEngine. EngineDeadError only if too many replicas died with the request, if none is left,
        or if none that is left could go on as the one that died."""
        failed: set[int] = set()  # replicas that the request was lost on

        async def give(attempt: EngineRequest) -> Serving:
            routing, number = self._choose(attempt, failed)
            is_again = bool(failed)
            failed.add(number)
            return self._serving(routing, number, attempt, is_again=is_again)

        return continuing(
            request,
            give,
            max_deaths=_MAX_DEATHS,
            engines="replicas",
            continued=self.continued,
            tells_why=(AdapterMissingError,),
        )

    def num_output(self) -> dict[str, int]:
        """Return how many tokens each request has from the replica that it is on."""
        return {name: each.report.num_output for name, each in self._in_flight.items()}

    def move(self, moves: Sequence[Moved]) -> list[Moved]:
        """Let requests go on elsewhere from where they are; return those that do. One that has ended or is
        not where it was, whose target is gone, or that would go on otherwise there, stays."""
        self._targets.clear()  # of earlier moves, which have been made or never will
        accepts = self._members.accepting()
        made = []
        for move in moves:
            found = self._in_flight.get(move.request_id)
            if found is None or found.replica != move.source or not accepts[move.target]:
                continue
            has_begun = found.report.num_output or found.request.output_token_ids
            continuation = self._members[move.target].continuation(found.request)
            if has_begun and continuation is not Continuation.SAME:
                continue
            self._targets[move.request_id] = move.target
            self._members[move.source].hand_over(found.request.request_id)
            made.append(move)
        return made

    @asynccontextmanager
    async def _serving(
        self, routing: LiveRouting, number: int, request: EngineRequest, *, is_again: bool
    ) -> AsyncIterator[Attempt]:
        """A request on a replica. `is_again`: it was sent to another one before, so that nobody may refuse it
        any more."""
        members, name = self._members, request_id_of(request.request_id)
        members.num_replayed[number] += is_again
        report = RequestReport(request, number, routing, self.recent)
        self._in_flight[name] = _InFlight(request, number, report)

        def saw(output: EngineOutput) -> None:
            if output.adapter_hit and output.token_ids and not report.num_output:
                members.num_hits[number] += 1
            report.saw(output)

        try:
            async with aclosing(cast("Outputs", members[number].generate(request))) as outputs:
                yield Attempt(outputs, saw)
        except EngineClosedError as error:
            if self.is_closing:
                raise
            raise RequestMovedError(f"replica {number} is shutting down ({error})") from error
        except BackendBusyError as error:
            if not is_again:
                raise
            await asyncio.sleep(_BUSY_S)
            raise RequestMovedError(f"replica {number} is too busy to go on with it ({error})") from error
        finally:
            report.close()
            del self._in_flight[name]

    def forecast(self, adapter: str | None, prompt_tokens: int, admitted: Admitted) -> Forecast | None:
        """See `waiting.Forecaster`."""
        routing = self.routing
        if routing is None:
            return None
        try:
            self._let_accept(routing, self._members.accepting())
            return routing.forecast(adapter, prompt_tokens, admitted)
        except (EngineDeadError, UnknownModelError):
            return None  # whoever sends it will be told

    def _choose(self, request: EngineRequest, failed: Set[int]) -> tuple[LiveRouting, int]:
        """Return the number of a replica, which has the request as its load from now on in this routing.
        Those that it was lost on are chosen only if there is no other."""
        routing = self.routing
        if routing is None:
            raise EngineDeadError("the fleet is starting; send the request again")
        accepts = self._members.accepting()
        target = self._targets.pop(request_id_of(request.request_id), None)
        if target is not None and accepts[target]:
            routing.route(request.request_id, request.adapter, request.num_tokens, to=target)
            self._members.num_sent[target] += 1
            return routing, target
        if request.output_token_ids:
            accepts = self._able_to_continue(request, accepts)
        others = [each and number not in failed for number, each in enumerate(accepts)]
        self._let_accept(routing, others if any(others) else accepts)
        number = routing.route(request.request_id, request.adapter, request.num_tokens)
        self._members.num_sent[number] += 1
        return routing, number

    @staticmethod
    def _let_accept(routing: LiveRouting, accepts: list[bool]) -> None:
        for number, accepts_now in enumerate(accepts):
            routing.accept(number, accepts=accepts_now)

    def _able_to_continue(self, request: EngineRequest, accepts: list[bool]) -> list[bool]:
        """Return which of the replicas that take requests go on with this one, as nearly as any of them does.

        Raises EngineDeadError if none can.
        """
        found = {n: self._members[n].continuation(request) for n, each in enumerate(accepts) if each}
        for wanted in (Continuation.SAME, Continuation.RESAMPLED):
            if wanted in found.values():
                if wanted is Continuation.RESAMPLED:
                    logger.warning("request %s goes on with new draws, not by its seed", request.request_id)
                return [found.get(number) is wanted for number in range(len(accepts))]
        raise EngineDeadError(
            "the replica of this request is gone, and no other one can go on where it was: a presence or "
            "frequency penalty would not count the answer so far there; send the request again"
        )
