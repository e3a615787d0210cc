"""The outputs of a request, reported to all who predict from them."""

from __future__ import annotations

from contextlib import aclosing

from loraplex.core.request import EngineRequest, FinishReason
from loraplex.server.continuing import Outputs
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.recent_requests import RecentRequests


async def reported(
    source: Outputs, request: EngineRequest, number: int, routing: LiveRouting, recent: RecentRequests
) -> Outputs:
    """The outputs of the replica of this number, which the routing has sent a request to and counts as its
    load from the first token to the end."""
    request_id = request.request_id
    rank = routing.request_of(request.adapter, request.num_tokens).rank
    note = recent.sent(number, request.adapter, rank, request.num_tokens)
    num_earlier = len(request.output_token_ids)
    served: int | None = None
    try:
        async with aclosing(source) as outputs:
            async for output in outputs:
                if output.token_ids:
                    if note.first_s is None:
                        routing.first_token(request_id)
                        note.num_cached = output.num_cached_tokens
                    recent.tokens(note, len(output.token_ids))
                if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    served = max(num_earlier + note.num_output, 1)
                yield output
    finally:
        recent.ended(note)
        routing.ended(request_id, served)
