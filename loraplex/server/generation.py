"""One generation request, from validated input to the last byte sent: the common part of chat and
completions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loraplex.core.errors import LoraplexError
from loraplex.core.request import FinishReason
from loraplex.core.tenants import NOBODY, Caller
from loraplex.engine.text_engine import CheckedPrompts, LogprobText, TextDelta, TextEngine
from loraplex.server.disconnect import run_until_disconnect
from loraplex.server.errors import counts_for_tenant, describe
from loraplex.server.generation_responses import PromptTokensDetails, Usage
from loraplex.server.metrics import RequestMeter
from loraplex.server.pacing import Pacer
from loraplex.server.request_log import part_sender, request_record
from loraplex.server.tenants.account import Spending
from loraplex.server.version_use import Lease
from loraplex.server.waiting import WaitingTicket

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(kw_only=True)
class ChoiceResult:
    """One choice, accumulated from deltas."""

    text_parts: list[str] = field(default_factory=list)
    sampled_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobText] = field(default_factory=list)
    prompt_logprobs: tuple[LogprobText, ...] | None = None
    finish_reason: FinishReason = FinishReason.STOP
    stop: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.text_parts)

    def add(self, delta: TextDelta) -> None:
        self.text_parts.append(delta.text)
        self.sampled_ids.extend(delta.sampled_ids)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop = delta.finish_reason, delta.stop


class AnswerFormat(Protocol):
    """The conversion of results to JSON, for chat or plain completions."""

    def chunks(self, batch: Sequence[TextDelta]) -> bytes:
        """Return the stream events for a batch of deltas; may be empty."""
        ...

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the last event of a stream, which reports its usage."""
        ...

    def answer(self, results: Sequence[ChoiceResult], usage: Usage) -> msgspec.Struct:
        """Return the whole answer of a request that does not stream."""
        ...


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An accepted request. `prompt_only`: generated tokens are dropped and not counted. `output_token_ids`:
    the beginning of the answer, generated elsewhere. `shown_ids`: special tokens that are part of the
    text. `caller`: whose request it is."""

    request_id: str
    checked: CheckedPrompts
    lease: Lease
    stream: bool
    include_usage: bool
    prompt_only: bool = False
    output_token_ids: tuple[int, ...] = ()
    shown_ids: frozenset[int] = frozenset()
    caller: Caller = NOBODY


class GenerationResponse(Response):
    """Runs a generation while its client is connected, and sends the results.

    This is no StreamingResponse: each batch of the engine is sent as one ASGI message without a task switch.
    The headers of a stream are sent when the engine has queued the request, however long it will wait there;
    a refusal by the engine comes earlier and is a proper HTTP error. The rest runs in its own task: a token
    wakes only the code it passes through, not everything around a request.
    """

    def __init__(
        self,
        *,
        text: TextEngine,
        generation: Generation,
        answer_format: AnswerFormat,
        meter: RequestMeter,
        ticket: WaitingTicket,
        spending: Spending | None,
        pacer: Pacer,
        is_resampled: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self._text = text
        self._generation = generation
        self._format = answer_format
        self._meter = meter
        self._ticket = ticket
        self._spending = spending
        self._pacer = pacer
        self._usage = _UsageCount(generation, is_resampled)
        self._failure: Exception | None = None
        self._traceparent = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = request_record(scope)
        record.begin(self._generation.request_id, self._meter, self._usage.total)
        self._traceparent = "" if record.trace is None else record.trace.traceparent
        is_stream = self._generation.stream
        work = self._send_stream(scope, send) if is_stream else self._send_whole(scope, receive, send)
        try:
            await run_until_disconnect(work, receive, self._pacer)
        except ClientDisconnect:
            pass  # the client is gone
        except Exception as error:
            self._fail(error)
            raise
        finally:
            if self._spending is not None:
                is_refused = not counts_for_tenant(self._failure)
                self._spending.close(is_complete=self._meter.is_complete, is_refused=is_refused)
            tpt_s = self._meter.tpt_s
            self._meter.close()
            self._ticket.close(tpt_s)
            self._generation.lease.release()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._meter.fail(error)

    def _batches(self) -> AsyncGenerator[list[TextDelta], None]:
        job = self._generation
        return self._text.stream(
            job.checked,
            adapter=job.lease.version,
            request_id=job.request_id,
            output_token_ids=job.output_token_ids,
            shown_ids=job.shown_ids,
            caller=job.caller,
            traceparent=self._traceparent,
        )

    def _observe(self, batch: list[TextDelta]) -> list[TextDelta]:
        """Count a batch; return its deltas that are not empty."""
        deltas = [delta for delta in batch if not delta.is_empty]
        if deltas:
            self._meter.on_batch(deltas)
            self._usage.add(deltas)
            if self._spending is not None and not self._generation.prompt_only:
                self._spending.generated(sum(delta.num_sampled for delta in deltas))
            if self._ticket.waits:
                for delta in deltas:
                    self._ticket.started(delta.choice)
        return deltas

    async def _send_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._batches()) as batches:
            first = await anext(batches)
            results = await asyncio.create_task(self._collect(first, batches))
        body = msgspec.json.encode(self._format.answer(results, self._usage.total()))
        await Response(body, media_type="application/json")(scope, receive, send)

    async def _collect(
        self, first: list[TextDelta], batches: AsyncIterator[list[TextDelta]]
    ) -> list[ChoiceResult]:
        results = [ChoiceResult() for _ in range(self._generation.checked.num_choices)]

        def add(batch: list[TextDelta]) -> None:
            for delta in self._observe(batch):
                results[delta.choice].add(delta)

        add(first)
        async for batch in batches:
            add(batch)
        return results

    async def _send_stream(self, scope: Scope, send: Send) -> None:
        async with aclosing(self._batches()) as batches:
            first = await anext(batches)  # raises if the engine refuses the request
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await asyncio.create_task(self._send_batches(part_sender(scope), first, batches))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_batches(
        self, send: Send, first: list[TextDelta], batches: AsyncIterator[list[TextDelta]]
    ) -> None:
        try:
            await self._send_chunks(send, first)
            async for batch in batches:
                await self._send_chunks(send, batch)
        except Exception as error:
            # The status has been sent: the stream itself must report the error, then end.
            self._fail(error)
            if not isinstance(error, LoraplexError):
                logger.exception("a stream failed")
            await _send_part(send, b"data: " + describe(error).body() + b"\n\n")
        else:
            last = self._format.usage_chunk(self._usage.total()) if self._generation.include_usage else b""
            await _send_part(send, last + _DONE)

    async def _send_chunks(self, send: Send, batch: list[TextDelta]) -> None:
        deltas = self._observe(batch)
        if deltas and (chunks := self._format.chunks(deltas)):
            since_s = self._meter.now_s()
            await _send_part(send, chunks)
            self._meter.sent(since_s)


class _UsageCount:
    def __init__(self, generation: Generation, is_resampled: Callable[[str], bool]) -> None:
        self._request_id = generation.request_id
        self._is_resampled = is_resampled
        self._num_prompt_tokens = sum(map(len, generation.checked.prompts))
        self._num_siblings = generation.checked.params.n
        self._prompt_only = generation.prompt_only
        self._version = generation.lease.version
        self._num_completion_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}

    def add(self, batch: Sequence[TextDelta]) -> None:
        for delta in batch:
            if not self._prompt_only:
                self._num_completion_tokens += delta.num_sampled
            # A prompt and its cached tokens are counted once, however many choices it has.
            if delta.num_cached_tokens and delta.choice % self._num_siblings == 0:
                self._num_cached_tokens[delta.choice] = delta.num_cached_tokens

    def total(self) -> Usage:
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_completion_tokens,
            total_tokens=self._num_prompt_tokens + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._num_cached_tokens.values())),
            adapter_version=msgspec.UNSET if self._version is None else self._version,
            reproducible=False if self._is_resampled(self._request_id) else msgspec.UNSET,
        )


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def now_unix_s() -> int:
    return int(time.time())


def head_bytes(fields: dict[str, Any]) -> bytes:
    """Return the fixed beginning of every chunk of one stream, up to and including `"choices":[`."""
    return b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['
