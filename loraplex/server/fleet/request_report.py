"""Report a request's progress to the routing and to the recent requests, which predictions are made from."""

from __future__ import annotations

from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.recent_requests import RecentRequests


class RequestReport:
    """Follows a request that the routing has sent to the replica with this number: it belongs to that
    replica's load until this is closed."""

    def __init__(
        self, request: EngineRequest, number: int, routing: LiveRouting, recent: RecentRequests
    ) -> None:
        self._request_id = request.request_id
        self._num_earlier = len(request.output_token_ids)
        self._routing = routing
        self._recent = recent
        rank = routing.request_of(request.adapter, request.num_tokens).rank
        self._note = recent.sent(number, request.adapter, rank, request.num_tokens)
        self._served: int | None = None

    @property
    def num_output(self) -> int:
        """Number of tokens that came from this replica."""
        return self._note.num_output

    def saw(self, output: EngineOutput) -> None:
        if output.token_ids:
            if self._note.first_s is None:
                self._routing.first_token(self._request_id)
                self._note.num_cached = output.num_cached_tokens
            self._recent.tokens(self._note, len(output.token_ids))
        if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._served = max(self._num_earlier + self.num_output, 1)

    def close(self) -> None:
        self._recent.ended(self._note)
        self._routing.ended(self._request_id, self._served)
