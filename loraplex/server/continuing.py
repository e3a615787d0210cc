"""Requests that outlive the engines which have them: where one dies, another goes on."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from enum import StrEnum

from loraplex.core.continuation import AnswerSoFar
from loraplex.core.errors import EngineClosedError, EngineDeadError, RequestMovedError
from loraplex.core.request import EngineOutput, EngineRequest

logger = logging.getLogger(__name__)

Outputs = AsyncGenerator[EngineOutput, None]
GiveToEngine = Callable[[EngineRequest], Awaitable[Outputs]]
"""Chooses an engine for a request, and returns its outputs there. Raises if there is none to choose."""


class Continued(StrEnum):
    """Why a request went on elsewhere: its engine died, or gave it up alive (drained, replaced, moved, or
    without a sign of life)."""

    DIED = "died"
    MOVED = "moved"


async def continuing(
    request: EngineRequest,
    give: GiveToEngine,
    *,
    max_deaths: int,
    engines: str,
    continued: Counter[Continued] | None = None,
) -> Outputs:
    """The outputs of a request, whichever engines they come from: each token once.

    It goes on elsewhere when its engine dies or hands it over, until `max_deaths` have died with it: it may
    be what they die of. `engines`: what they are called then. `continued`: counts how often that happens.
    """
    answer, num_deaths = AnswerSoFar(request), 0
    while True:
        source = await give(answer.attempt())
        try:
            async with aclosing(source) as outputs:
                async for output in outputs:
                    if (told := answer.add(output)) is not None:
                        yield told
            return
        except EngineClosedError:
            raise
        except EngineDeadError as error:
            is_death = not isinstance(error, RequestMovedError)
            num_deaths += is_death
            end = answer.missing_end()
            if end is None and is_death and num_deaths == max_deaths:
                if num_deaths == 1:
                    raise
                raise EngineDeadError(
                    f"{num_deaths} {engines} died one after the other while they had this request; it may be "
                    "the reason, so it is not sent to another one"
                ) from error
            where = f"after {answer.num_tokens} tokens" if answer.num_tokens else "from the beginning"
            logger.warning("request %s goes on elsewhere, %s: %s", request.request_id, where, error)
        if end is not None:
            yield end
            return
        if continued is not None:
            continued[Continued.DIED if is_death else Continued.MOVED] += 1
