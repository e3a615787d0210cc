"""Staging an adapter version: a request of one token brings it all the way that other requests will go.

The engine reads the weights, which finds files that are gone, cut short or other than those that were hashed,
puts them where it computes, and runs a step with them, which finds weights that overflow.
"""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from loraplex.core.errors import AdapterError, LoraplexError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from loraplex.engine.interface import AsyncEngine


async def answer_once(engine: AsyncEngine, version: str) -> None:
    """Have an engine make one token with a version that it knows. Raises as AsyncEngine.stage_adapter."""
    request = EngineRequest(
        request_id=f"stage-{uuid.uuid4().hex}",
        prompt_token_ids=[0],  # any: every vocabulary has it
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        adapter=version,
    )
    outputs = cast("AsyncGenerator[EngineOutput, None]", engine.generate(request))
    async with aclosing(outputs):
        async for output in outputs:
            if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                message = output.error or "the engine does not say why"
                raise AdapterError(message) if output.error_param == "model" else LoraplexError(message)
