"""The server in front of simulated engines: it refuses the requests that a live one would refuse."""

from __future__ import annotations

from typing import NamedTuple

from loraplex.core.tenants import Caller
from loraplex.fleet.admission import Forecast
from loraplex.fleet.controller import Controller
from loraplex.fleet.first_token import forecast
from loraplex.fleet.waiting_room import WaitingRoom
from loraplex.workload.jsonl import WorkloadRequest


class _Admitted(NamedTuple):
    """A request without a first token yet."""

    caller: Caller
    request: WorkloadRequest
    predicted: Forecast


class Front:
    """Decides by the same rules as a live server: see `fleet.waiting_room`. Prompts are encoded at once."""

    def __init__(self, room: WaitingRoom, *, step_tokens: int) -> None:
        """`step_tokens`: most tokens that a step prefills and decodes."""
        self._room = room
        self._step_tokens = step_tokens
        self._waiting: dict[int, _Admitted] = {}

    def admits(self, number: int, request: WorkloadRequest, controller: Controller) -> bool:
        """Return whether a request that arrives now is admitted; if so, it waits from now on."""
        caller, room = Caller(tenant=request.tenant), self._room
        if not room.has_place_for(request.tenant, 1):
            return False
        routed = controller.request_of(request.adapter, request.prompt_tokens)
        predicted = forecast(
            routed,
            controller.view,
            controller.would_choose(routed),
            admitted=room.before(caller, num_tokens=request.prompt_tokens),
            step_tokens=self._step_tokens,
        )
        verdict = room.judge(predicted, caller)
        if verdict is not None and verdict.retry_after_s is not None:
            return False
        room.enter(caller, 1)
        room.encoded(caller, [request.prompt_tokens])
        self._waiting[number] = _Admitted(caller, request, predicted)
        return True

    def began(self, number: int, at_s: float) -> None:
        """Record that a request has its first token."""
        self._leave(number, at_s)

    def ended(self, number: int) -> None:
        """Record that a request ended, with or without a first token."""
        self._leave(number, None)

    def _leave(self, number: int, first_token_s: float | None) -> None:
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        caller, request, predicted = waiting
        self._room.leave(caller, request.prompt_tokens)
        if first_token_s is not None:
            self._room.came(predicted, first_token_s - request.arrival_s, caller)
