"""The outputs of a request, reported to the routing that counts it as load."""

from __future__ import annotations

from contextlib import aclosing

from loraplex.core.request import EngineRequest, FinishReason
from loraplex.server.continuing import Outputs
from loraplex.server.fleet.live_routing import LiveRouting


async def reported(source: Outputs, request: EngineRequest, routing: LiveRouting) -> Outputs:
    """The outputs of an engine that the routing has sent a request to, from the first token to the end."""
    request_id = request.request_id
    num_tokens, num_earlier = 0, len(request.output_token_ids)
    served: int | None = None
    try:
        async with aclosing(source) as outputs:
            async for output in outputs:
                if output.token_ids and not num_tokens:
                    routing.first_token(request_id)
                num_tokens += len(output.token_ids)
                if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    served = max(num_earlier + num_tokens, 1)
                yield output
    finally:
        routing.ended(request_id, served)
