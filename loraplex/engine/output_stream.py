"""The outputs of one request between an engine and one consumer, merged when the consumer is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain

from loraplex.core.request import EngineOutput

Take = Callable[[], Awaitable[EngineOutput]]
"""Waits for the next outputs of a request and returns them as one. Not called again after an output with a
finish reason."""


async def outputs_of(opened: AbstractAsyncContextManager[Take]) -> AsyncGenerator[EngineOutput, None]:
    """Yield the outputs of a request while `opened` is open."""
    async with opened as take:
        finished = False
        while not finished:
            output = await take()
            finished = output.finish_reason is not None
            yield output


class OutputStream:
    """A queue with one consumer, used from one event loop. `is_finished`: the consumer has taken the last
    output.

    The consumer gets everything since its last call as one output, so that a slow client costs one wake-up
    however many steps have passed, and the queue is bounded by max_tokens.
    """

    __slots__ = ("_error", "_pending", "_waiter", "is_finished")

    def __init__(self) -> None:
        self.is_finished = False
        self._pending: list[EngineOutput] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: EngineOutput) -> None:
        """Add an output, unless the stream has failed: later outputs are dropped."""
        if self._error is None:
            self._pending.append(output)
            self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream: outputs pushed before are still delivered, then `error` is raised."""
        self._error = error
        self._wake()

    async def take(self) -> EngineOutput:
        """Return everything since the last call as one output; wait for the first. Raises the error given to
        `fail`."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output = self._pending[0] if len(self._pending) == 1 else merge_outputs(self._pending)
        self._pending.clear()
        self.is_finished = output.finish_reason is not None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge_outputs(outputs: Sequence[EngineOutput]) -> EngineOutput:
    """Return consecutive outputs of one request as if one step had made them."""
    first, last = outputs[0], outputs[-1]
    return EngineOutput(
        request_id=first.request_id,
        token_ids=tuple(chain.from_iterable(output.token_ids for output in outputs)),
        logprobs=tuple(chain.from_iterable(output.logprobs for output in outputs)),
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
        num_cached_tokens=max(output.num_cached_tokens for output in outputs),
        adapter_hit=next((o.adapter_hit for o in outputs if o.adapter_hit is not None), None),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error=last.error,
        error_param=last.error_param,
        times=next((o.times for o in outputs if o.times is not None), None),
    )
