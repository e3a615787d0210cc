"""Staging an adapter version: a request of one token exercises the whole path of other requests.

The engine reads the weights, which detects files that are missing, truncated or changed since they were
hashed, loads them, and runs a step with them, which detects weights that overflow.
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
    """Generate one token with a version that the engine knows. Raises as AsyncEngine.stage_adapter does."""
    request = EngineRequest(
        request_id=f"stage-{uuid.uuid4().hex}",
        prompt_token_ids=[0],  # in every vocabulary
        params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        adapter=version,
    )
    outputs = cast("AsyncGenerator[EngineOutput, None]", engine.generate(request))
    async with aclosing(outputs):
        async for output in outputs:
            if output.finish_reason in (FinishReason.ERROR, FinishReason.CANCELLED):
                message = output.error or "the engine does not say why"
                raise AdapterError(message) if output.error_param == "model" else LoraplexError(message)
