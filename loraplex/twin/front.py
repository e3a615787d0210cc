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
    """A request that has not ended. `began_s`: when its first token came; None until then."""

    caller: Caller
    request: WorkloadRequest
    predicted: Forecast
    began_s: float | None = None


class Front:
    """Decides by the same rules as a live server: see `fleet.waiting_room`. Prompts are encoded at once."""

    def __init__(self, room: WaitingRoom, *, step_tokens: int) -> None:
        """`step_tokens`: most tokens that a step prefills and decodes."""
        self._room = room
        self._step_tokens = step_tokens
        self._admitted: dict[int, _Admitted] = {}

    def admits(self, number: int, request: WorkloadRequest, controller: Controller) -> bool:
        """Return whether a request that arrives now is admitted; if so, it waits from now on."""
        caller, room = Caller(tenant=request.tenant), self._room
        room.observe(request.arrival_s)
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
        self._admitted[number] = _Admitted(caller, request, predicted)
        return True

    def began(self, number: int, at_s: float) -> None:
        """Record that a request has its first token."""
        admitted = self._admitted.get(number)
        if admitted is None or admitted.began_s is not None:  # again, after it was moved
            return
        caller, request, predicted, _ = admitted
        self._admitted[number] = admitted._replace(began_s=at_s)
        self._room.pass_time(at_s)
        self._room.began(caller, request.prompt_tokens)
        self._room.came(predicted, at_s - request.arrival_s, caller)

    def ended(self, number: int, at_s: float, *, is_whole: bool) -> None:
        """Record that a request ended, with or without a first token. `is_whole`: with a whole answer."""
        admitted = self._admitted.pop(number, None)
        if admitted is None:
            return
        caller, request, predicted, began_s = admitted
        self._room.pass_time(at_s)
        if began_s is None:
            self._room.leave(caller, request.prompt_tokens)
            return
        self._room.ended(caller)
        if is_whole and request.output_tokens > 1:
            self._room.paced(predicted, (at_s - began_s) / (request.output_tokens - 1), caller)
