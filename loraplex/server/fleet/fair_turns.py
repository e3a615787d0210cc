"""Requests that wait in front of servers which know no tenants, in the order of fair shares.

Servers behind `--backend` serve what they are sent in an order of their own. So where requests compete, each
server has only a few without a token, and the others wait here: first come those that an engine of ours
would serve first (`scheduling.fair_queue`). What tenants got is counted in tokens, since nobody knows what
they cost there.

    enter --> waiting --- a server has room ---> sent --- first token ---> started --> leave
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.errors import EngineClosedError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.core.tenants import TenantPolicy
from loraplex.scheduling.fair_queue import FairQueue
from loraplex.scheduling.fair_share import FairShare, RequestCosts
from loraplex.scheduling.request_state import RequestState

_UNSTARTED_PER_SERVER: Final = 8
"""Requests without a token that a server has: enough for its next steps, few enough for who comes next."""


class _Turn:
    """One request. `may_go`: resolved when it may be sent."""

    def __init__(self, state: RequestState, may_go: asyncio.Future[None]) -> None:
        self.state = state
        self.may_go = may_go
        self.is_unstarted = False  # sent, without a token


class FairTurns:
    """The order in which requests of a fleet are sent. `num_servers`: returns how many take requests. For use
    in one event loop."""

    def __init__(self, clock: Clock, num_servers: Callable[[], int]) -> None:
        self._clock = clock
        self._num_servers = num_servers
        self._fair = FairShare(RequestCosts(None, lambda version: 0))
        self._queue = FairQueue(self._fair, clock)
        self._waiting: dict[RequestState, _Turn] = {}
        self._has_tenants = False
        self._num_arrived = 0
        self._num_unstarted = 0

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """Replace the rights of tenants."""
        self._fair.set_policies(policies)
        self._has_tenants = bool(policies)

    async def in_turn(
        self, request: EngineRequest, send: Callable[[EngineRequest], AsyncGenerator[EngineOutput, None]]
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the outputs of a request, which is sent when it is its turn. Raises EngineClosedError if the
        fleet is closed before."""
        turn = self._enter(request)
        try:
            await turn.may_go
            async with aclosing(send(request)) as outputs:
                async for output in outputs:
                    if output.token_ids:
                        self._count(turn, output)
                    yield output
        finally:
            self._leave(turn)

    def close(self) -> None:
        """End the requests that wait."""
        for turn in self._waiting.values():
            if not turn.may_go.done():
                turn.may_go.set_exception(EngineClosedError("the fleet is shutting down"))

    def _enter(self, request: EngineRequest) -> _Turn:
        state = RequestState(request, self._num_arrived, queued_s=self._clock.now_s())
        state.slo_ttft_s = self._fair.slo_ttft_s(request)
        self._num_arrived += 1
        turn = _Turn(state, asyncio.get_running_loop().create_future())
        self._fair.arrives(state, self._queue.tenants, ())
        self._queue.append(state)
        self._waiting[state] = turn
        self._send_next()
        return turn

    def _count(self, turn: _Turn, output: EngineOutput) -> None:
        """Charge the tenant for new tokens."""
        turn.state.token_ids += output.token_ids
        self._fair.settle((turn.state,))
        self._started(turn)

    def _leave(self, turn: _Turn) -> None:
        if self._waiting.pop(turn.state, None) is not None:
            self._queue.give_up(turn.state)
        self._fair.ended(turn.state)
        self._started(turn)

    def _started(self, turn: _Turn) -> None:
        if turn.is_unstarted:
            turn.is_unstarted = False
            self._num_unstarted -= 1
            self._send_next()

    def _send_next(self) -> None:
        """Let requests go, as long as servers have room for them, or none competes with others."""
        most = _UNSTARTED_PER_SERVER * max(self._num_servers(), 1)
        while self._waiting and (self._num_unstarted < most or not self._competes):
            self._queue.arrange(1)
            state = next(iter(self._queue.first(1)))
            self._queue.remove(state)
            self._fair.admitted(state)
            turn = self._waiting.pop(state)
            turn.is_unstarted = True
            self._num_unstarted += 1
            if not turn.may_go.done():
                turn.may_go.set_result(None)

    @property
    def _competes(self) -> bool:
        return self._has_tenants or self._fair.is_shared
