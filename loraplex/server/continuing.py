"""Requests that outlive their engine: if it dies, another engine continues them."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from enum import StrEnum
from typing import NamedTuple

from loraplex.core.continuation import AnswerSoFar
from loraplex.core.errors import EngineClosedError, EngineDeadError, RequestMovedError
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.engine.output_stream import Take

logger = logging.getLogger(__name__)

Outputs = AsyncGenerator[EngineOutput, None]


class Attempt(NamedTuple):
    """A request on one engine. `take` waits for its outputs. `saw` must be called with each output taken."""

    take: Take
    saw: Callable[[EngineOutput], None]


Serving = AbstractAsyncContextManager[Attempt]
"""A context during which an engine has a request."""
GiveToEngine = Callable[[EngineRequest], Awaitable[Serving]]
"""Chooses an engine for a request. Raises if no engine can be chosen."""


class EngineSilentError(RequestMovedError):
    """The engine has given no sign of life, or has sent nothing for this request, for too long, so the
    request was taken from it."""


class Continued(StrEnum):
    """The reason why a request was continued elsewhere: its engine died, gave it up while alive (drained,
    replaced, migrated or silent), or refused it."""

    DIED = "died"
    MOVED = "moved"
    REFUSED = "refused"


class NotTakenError(RequestMovedError):
    """The engine is healthy but does not accept the request. `is_last`: no other engine does either, so the
    request ends with this error."""

    is_last = False


async def continuing(
    request: EngineRequest,
    give: GiveToEngine,
    *,
    max_in_a_row: int,
    max_in_all: int,
    engines: str,
    continued: Counter[Continued] | None = None,
) -> Outputs:
    """Yield the outputs of a request across the engines that serve it: each token once.

    It is continued elsewhere when its engine dies or hands it over, until so many engines have died with it
    that it may be the cause: `max_in_a_row` without a token of it in between, because a crash that it causes
    would repeat at once, or `max_in_all`. Engines that fell silent with it count only for `max_in_a_row`, as
    a machine may stop for a while for other reasons. `engines`: how the error names them. `continued`: counts
    the continuations.
    """
    answer, num_in_a_row, num_in_all = AnswerSoFar(request), 0, 0
    while True:
        num_tokens = answer.num_tokens
        attempt = await give(answer.attempt())
        try:
            async with attempt as (take, saw):
                finished = False
                while not finished:
                    output = await take()
                    saw(output)
                    finished = output.finish_reason is not None
                    if (reported := answer.add(output)) is not None:
                        yield reported
            return
        except EngineClosedError:
            raise
        except EngineDeadError as error:
            is_death = not isinstance(error, RequestMovedError)
            if answer.num_tokens > num_tokens:
                num_in_a_row = 0
            num_in_a_row += is_death or isinstance(error, EngineSilentError)
            num_in_all += is_death
            end = answer.missing_end()
            is_refused = isinstance(error, NotTakenError)
            if end is None and isinstance(error, NotTakenError) and error.is_last:
                raise
            if end is None and (num_in_a_row == max_in_a_row or num_in_all == max_in_all):
                if max(num_in_a_row, num_in_all) == 1:
                    raise
                raise EngineDeadError(
                    f"{max(num_in_a_row, num_in_all)} {engines} died or fell silent one after the other "
                    "while they had this request; it may be the reason, so it is not sent to another one"
                ) from error
            where = f"after {answer.num_tokens} tokens" if answer.num_tokens else "from the beginning"
            reason = str(error).partition("; ")[0]  # without the advice, which is for clients
            logger.warning("request %s goes on elsewhere, %s: %s", request.request_id, where, reason)
        if end is not None:
            yield end
            return
        if continued is not None:
            why = Continued.REFUSED if is_refused else Continued.DIED if is_death else Continued.MOVED
            continued[why] += 1
