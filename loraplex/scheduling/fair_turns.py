"""The order of requests in front of a server that knows no tenants, by fair shares.

Such a server serves what it is sent in an order of its own. So where requests compete, it has only a few
without a token, and the others wait: first come those that an engine of ours would serve first
(`fair_queue`). What tenants got is counted in tokens, since nobody knows what they cost there.

    arrives --> waiting --- the server has room ---> sent --- first token ---> started --> ended
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from loraplex.core.clock import Clock
from loraplex.core.request import EngineRequest
from loraplex.core.tenants import TenantPolicy
from loraplex.scheduling.fair_queue import FairQueue
from loraplex.scheduling.fair_share import FairShare, RequestCosts
from loraplex.scheduling.request_state import RequestState

MAX_UNSTARTED: Final = 8
"""Requests without a token that a server has: enough for its next steps, few enough for who comes next."""


class FairTurns:
    """Decides which request is sent to one server next, and whether it has room for it."""

    def __init__(self, clock: Clock) -> None:
        self._fair = FairShare(RequestCosts(None, lambda version: 0))
        self._queue = FairQueue(self._fair, clock)
        self._waiting: set[RequestState] = set()
        self._unstarted: set[RequestState] = set()  # sent, without a token
        self._has_tenants = False
        self._num_arrived = 0

    def set_tenants(self, policies: Sequence[TenantPolicy]) -> None:
        """Replace the rights of tenants."""
        self._fair.set_policies(policies)
        self._has_tenants = bool(policies)

    def arrives(self, request: EngineRequest, queued_s: float) -> RequestState:
        """Let a request wait that could be sent now. `queued_s`: when the server was chosen for it."""
        state = RequestState(request, self._num_arrived, queued_s=queued_s)
        state.slo_ttft_s = self._fair.slo_ttft_s(request)
        self._num_arrived += 1
        self._fair.arrives(state, self._queue.tenants, ())
        self._queue.append(state)
        self._waiting.add(state)
        return state

    def take_next(self) -> RequestState | None:
        """Return the request that is sent now; None if none waits, or the server has no room. It has room
        for all while nothing competes."""
        is_full = len(self._unstarted) >= MAX_UNSTARTED
        if not self._waiting or (is_full and (self._has_tenants or self._fair.is_shared)):
            return None
        self._queue.arrange(1)
        state = next(iter(self._queue.first(1)))
        self._queue.remove(state)
        self._waiting.remove(state)
        self._fair.admitted(state)
        self._unstarted.add(state)
        return state

    def got(self, state: RequestState, token_ids: Sequence[int]) -> None:
        """Charge the tenant of a request that was sent for new tokens of its answer."""
        state.token_ids += token_ids
        self._fair.settle((state,))
        self._unstarted.discard(state)

    def ended(self, state: RequestState) -> None:
        """Forget a request, wherever it is."""
        if state in self._waiting:
            self._waiting.remove(state)
            self._queue.give_up(state)
        self._unstarted.discard(state)
        self._fair.ended(state)
