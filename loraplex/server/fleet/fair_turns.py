"""Requests that wait for their turn in front of a server which knows no tenants (`scheduling.fair_turns`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from loraplex.core.clock import Clock
from loraplex.core.request import EngineRequest
from loraplex.core.tenants import TenantPolicy
from loraplex.scheduling.fair_turns import FairTurns
from loraplex.scheduling.request_state import RequestState


class WaitForTurns:
    """The requests in front of one server. For use in one event loop."""

    def __init__(self, clock: Clock) -> None:
        self._turns = FairTurns(clock)
        self._may_go: dict[RequestState, asyncio.Future[None]] = {}

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """Replace the rights of tenants."""
        self._turns.set_tenants(policies)
        self._let_go()

    @property
    def num_waiting(self) -> int:
        return len(self._may_go)

    async def wait(self, request: EngineRequest, queued_s: float) -> RequestState:
        """Return when it is a request's turn. It has to `leave` then."""
        turn = self._turns.arrives(request, queued_s)
        may_go = self._may_go[turn] = asyncio.get_running_loop().create_future()
        self._let_go()
        try:
            await may_go
        except asyncio.CancelledError:
            self.leave(turn)
            raise
        return turn

    def got(self, turn: RequestState, token_ids: Sequence[int]) -> None:
        """Charge new tokens of an answer; the first ones make room for others."""
        self._turns.got(turn, token_ids)
        self._let_go()

    def leave(self, turn: RequestState) -> None:
        """Make room: the request has ended, or is taken from the server."""
        self._may_go.pop(turn, None)
        self._turns.ended(turn)
        self._let_go()

    def _let_go(self) -> None:
        while (turn := self._turns.take_next()) is not None:
            may_go = self._may_go.pop(turn)
            if not may_go.done():  # else it was cancelled, and is about to leave
                may_go.set_result(None)
