"""Requests to a server elsewhere, from the first byte sent to the last one read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import aiohttp

from loraplex.core.clock import Clock
from loraplex.core.errors import (
    EngineClosedError,
    EngineDeadError,
    LoraplexError,
    RequestMovedError,
    UnknownModelError,
)
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.engine.output_stream import Take
from loraplex.scheduling.request_state import RequestState
from loraplex.server.fleet.backend_adapters import BackendAdapters
from loraplex.server.fleet.backend_errors import (
    AdapterMissingError,
    NotAcceptedError,
    UnavailableError,
    request_error,
)
from loraplex.server.fleet.backend_http import Answer, BackendHttp, UnreachableError
from loraplex.server.fleet.completion_stream import CompletionReader, failed_output
from loraplex.server.fleet.fair_turns import WaitForTurns
from loraplex.server.fleet.liveness import Liveness
from loraplex.server.fleet.stalled_streams import StalledStreams, StreamWait
from loraplex.server.request_log import VERSION_HEADER

_VERSION_HEADER: Final = VERSION_HEADER.decode()
_REFUSAL_TIMEOUT_S: Final = 10.0
_END_WAIT_S: Final = 0.1
"""Seconds to wait for the end of a body after its last event, so that the connection can be reused."""


@dataclass(slots=True)
class _Call(StreamWait):
    """A request that is sent or being answered. `opening`: the timeout of its wait for the headers; `reader`:
    its body. `moved`: why it was given up while it was being opened. `is_reported`: its reader knows that it
    is queued. `queued_s`: when it came here; `awaits_turn`, `turn`: see `fair_turns`."""

    queued_s: float = 0.0
    awaits_turn: bool = False
    turn: RequestState | None = None
    opening: asyncio.Timeout | None = None
    reader: aiohttp.StreamReader | None = None
    moved: RequestMovedError | None = None
    is_reported: bool = False

    def give_up(self, reason: RequestMovedError) -> None:
        if self.reader is not None:
            self.reader.set_exception(reason)
        elif self.opening is not None and not self.opening.expired():
            self.moved = reason
            self.opening.reschedule(asyncio.get_running_loop().time())


class OpenCompletion(NamedTuple):
    """The answer to a request as it streams in. `wait`: how long the request has waited for the server."""

    take: Take
    wait: StreamWait


class CompletionCalls:
    """Runs requests on one server. `on_first_token` is called for every request that gets one, `on_trouble`
    for errors that may mean that the server is gone. `turns`: the order in which they are sent."""

    def __init__(
        self,
        http: BackendHttp,
        adapters: BackendAdapters,
        liveness: Liveness,
        stalls: StalledStreams,
        turns: WaitForTurns,
        clock: Clock,
        *,
        vocab_size: int | None,
        on_first_token: Callable[[], None],
        on_trouble: Callable[[EngineDeadError], None],
    ) -> None:
        self._http = http
        self._adapters = adapters
        self._liveness = liveness
        self._stalls = stalls
        self._turns = turns
        self._clock = clock
        self._vocab_size = vocab_size
        self._on_first_token = on_first_token
        self._on_trouble = on_trouble
        self._calls: dict[str, _Call] = {}  # by request

    def give_up(self, request_id: str, reason: RequestMovedError) -> None:
        """End one request with `reason`, if it is open."""
        if (call := self._calls.get(request_id)) is not None:
            call.give_up(reason)

    def give_up_waiting(self, reason: RequestMovedError) -> None:
        """End the requests that wait for their turn with `reason`."""
        for call in self._calls.values():
            if call.awaits_turn:
                call.give_up(reason)

    def stalled(self) -> list[str]:
        """Return the requests that have stalled."""
        return self._stalls.among(self._calls)

    def computes(self) -> bool:
        """Return whether the server has recently shown that it computes."""
        return self._stalls.computes(self._calls)

    @asynccontextmanager
    async def open(
        self, request: EngineRequest, body: dict[str, Any], on_sent: Callable[[], None]
    ) -> AsyncIterator[OpenCompletion]:
        """Yield the answer to one request, which is cancelled there if this context ends early. `on_sent` is
        called when its turn has come. Raises NotAcceptedError if the server goes away before it has begun to
        answer."""
        era, has_begun = self._liveness.era, False
        call = self._calls[request.request_id] = _Call(request.num_tokens, queued_s=self._clock.now_s())
        try:
            response = await self._open(request, body, era, call, on_sent)
            has_begun = True
            try:
                call.reader, call.waits_since_s = response.content, None
                with self._liveness.reading(response.content, era):
                    reader = CompletionReader(request, self._http.url, self._vocab_size)
                    take = partial(self._take, request, call, response.content, reader)
                    yield OpenCompletion(take, call)
            finally:
                # If everything was read, the connection is kept for the next request; otherwise it is closed,
                # which cancels the request there.
                (response.release if response.content.at_eof() else response.close)()
        except (RequestMovedError, EngineClosedError):
            raise
        except EngineDeadError as error:
            is_known = era != self._liveness.era
            if not is_known:
                self._on_trouble(error)
            if not has_begun and (is_known or isinstance(error, (UnreachableError, UnavailableError))):
                raise NotAcceptedError(str(error)) from error
            raise
        finally:
            del self._calls[request.request_id]
            self._end_turn(call)

    async def _open(
        self,
        request: EngineRequest,
        body: dict[str, Any],
        era: int,
        call: _Call,
        on_sent: Callable[[], None],
    ) -> aiohttp.ClientResponse:
        """Send a request. If the server turns out not to have the adapter, it is loaded there again, once."""
        url, adapter = self._http.url, request.adapter
        for is_last in (False, True):
            try:
                async with self._liveness.waiting(era) as call.opening:
                    call.waits_since_s = None  # while the adapter is loaded, perhaps once more
                    if adapter is not None:
                        await self._have(adapter)
                    await self._come_to_turn(request, call)
                    on_sent()
                    call.waits_since_s = self._clock.now_s()
                    response = await self._http.open_stream(
                        "/v1/completions", body, traceparent=request.traceparent
                    )
            except TimeoutError:
                if call.moved is None:
                    raise
                raise call.moved from None
            finally:
                call.opening = None
            self._liveness.heard()
            found = response.headers.get(_VERSION_HEADER)
            if response.status == 200 and (found is None or found == adapter):
                return response
            if response.status == 200:
                response.close()
                problem: LoraplexError = EngineDeadError(
                    f"the server at {url} answers with version {found} of an adapter, not with {adapter}"
                )
            else:
                problem = request_error(await _whole(response), url)
                if response.status != 404:
                    raise problem
            if is_last or adapter is None:
                raise problem
            self._adapters.doubt(adapter)
            self._end_turn(call)  # others need not wait for the adapter
        raise AssertionError("one of the two attempts has returned or raised")

    async def _come_to_turn(self, request: EngineRequest, call: _Call) -> None:
        """Wait until it is a request's turn. One that began elsewhere has had its turn."""
        if request.output_token_ids:
            return
        call.awaits_turn = True
        try:
            call.turn = await self._turns.wait(request, call.queued_s)
        finally:
            call.awaits_turn = False

    def _end_turn(self, call: _Call) -> None:
        if call.turn is not None:
            self._turns.leave(call.turn)
            call.turn = None

    async def _have(self, adapter: str) -> None:
        """Make sure that the server has an adapter. Raises AdapterMissingError if it refuses one that it
        should have: the fleet's client has done nothing wrong, and another replica may have it."""
        try:
            await self._adapters.load(adapter)
        except (EngineDeadError, UnknownModelError):
            raise
        except LoraplexError as error:
            version, url = adapter[:12], self._http.url
            raise AdapterMissingError(
                f"the server at {url} does not have adapter version {version} any more: {error}"
            ) from error

    async def _take(
        self, request: EngineRequest, call: _Call, content: aiohttp.StreamReader, reader: CompletionReader
    ) -> EngineOutput:
        if not call.is_reported:
            call.is_reported = True
            return EngineOutput(request_id=request.request_id)  # it is queued
        call.waits_since_s = self._clock.now_s()
        output = await self._next_output(request, content, reader)
        call.waits_since_s = None
        if output.token_ids:
            self._stalls.arrived()
            if call.turn is not None:
                self._turns.got(call.turn, output.token_ids)
            if not call.has_tokens:
                call.has_tokens = True
                self._on_first_token()
        return output

    async def _next_output(
        self, request: EngineRequest, content: aiohttp.StreamReader, reader: CompletionReader
    ) -> EngineOutput:
        """Read until there is an output; everything that arrived since the last call is merged into it."""
        try:
            while True:
                data = await content.readany()
                self._liveness.heard()
                reader.feed(data)
                if reader.ended:
                    await _read_to_end(content)
                if (output := reader.take()) is not None:
                    return output
        except (aiohttp.ClientError, OSError) as error:
            raise self._http.unreachable(error) from error
        except LoraplexError as error:
            if (failed := failed_output(request, error)) is not None:
                return failed
            raise


async def _whole(response: aiohttp.ClientResponse) -> Answer:
    """Read an answer that is not a stream."""
    async with response:
        try:
            async with asyncio.timeout(_REFUSAL_TIMEOUT_S):
                body = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            body = b""  # the status says enough
    return Answer(status=response.status, headers=dict(response.headers), body=body)


async def _read_to_end(content: aiohttp.StreamReader) -> None:
    """Read up to the end of the body, which should follow the last event, so that the connection can be
    reused."""
    try:
        async with asyncio.timeout(_END_WAIT_S):
            while not content.at_eof():
                await content.readany()
    except (aiohttp.ClientError, OSError, TimeoutError):
        pass  # everything that matters was read
