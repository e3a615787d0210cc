"""A streaming client of /v1/completions that measures one request at a time.

Prompts are lists of token ids, so that their length is exact whatever the tokenizer; decoding is
greedy and ignores the end-of-sequence token, so that the output length is exact too.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import aiohttp

from loraplex.bench.records import RequestRecord
from loraplex.bench.sse import StreamTally, error_text
from loraplex.core.errors import LoraplexError
from loraplex.core.words import no_server, unknown_name

Clock = Callable[[], float]

_PROBED_TOKEN: Final = 10


class BenchError(LoraplexError):
    """The benchmark cannot start: no server, no such model, or a server that is not OpenAI-compatible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRequest:
    """One request, ready to send: the body is encoded before the clock starts."""

    model: str
    prompt_tokens: int
    output_tokens: int
    body: bytes


def encode_request(*, model: str, prompt_token_ids: list[int], output_tokens: int) -> BenchRequest:
    body = {
        "model": model,
        "prompt": prompt_token_ids,
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return BenchRequest(
        model=model,
        prompt_tokens=len(prompt_token_ids),
        output_tokens=output_tokens,
        body=json.dumps(body, separators=(",", ":")).encode(),
    )


class CompletionClient:
    """A client of one server, with connections kept alive and reused (`keep_alive`). An async context
    manager."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        keep_alive: bool = True,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._root = base_url.rstrip("/").removesuffix("/v1")
        self._keep_alive = keep_alive
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self.clock = clock

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # limit=0: the load generator alone decides how many requests are open.
            connector=aiohttp.TCPConnector(limit=0, force_close=not self._keep_alive),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s),
            # A proxy from the environment would be measured along with the server.
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._session.close()

    async def complete(self, request: BenchRequest, *, arrival_s: float | None = None) -> RequestRecord:
        """Send the request and read its stream to the end. Server and connection errors are recorded, not
        raised.

        `arrival_s` is the time the request was due; None means now.
        """
        if arrival_s is None:
            arrival_s = self.clock()
        tally = StreamTally()
        try:
            await self._stream(request, tally)
        except TimeoutError:
            tally.error = f"no complete answer within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            tally.error = self._no_server(error)
        except (aiohttp.ClientError, OSError) as error:
            tally.error = f"{type(error).__name__}: {error}"
        return self._record(request, tally, arrival_s)

    async def base_model(self) -> str:
        """Return the first model that is not an adapter (an adapter names its parent). Raises BenchError."""
        bases = [name for name, parent in (await self._models()).items() if parent is None]
        if not bases:
            raise BenchError(f"{self._root}/v1/models: no base model listed; name one with --model")
        return bases[0]

    async def check_adapters(self, names: Sequence[str]) -> None:
        """Raise BenchError for the first adapter that the server does not have. Servers need not list their
        adapters, so those that are not listed are sent a short request."""
        listed = await self._models()
        for name in dict.fromkeys(names):
            if name in listed:
                continue
            probe = encode_request(model=name, prompt_token_ids=[_PROBED_TOKEN], output_tokens=1)
            error = (await self.complete(probe)).error
            if error is not None:
                adapters = [each for each, parent in listed.items() if parent is not None]
                raise BenchError(f"{unknown_name('adapter', name, adapters)} ({error})")

    async def _models(self) -> dict[str, object]:
        """Return the parent of each model that the server lists, by name; None for base models. Raises
        BenchError."""
        try:
            async with self._session.get(f"{self._root}/v1/models") as response:
                body = await response.read()
                if response.status != 200:
                    raise BenchError(f"{self._root}/v1/models: HTTP {response.status}: {error_text(body)}")
            models = json.loads(body)["data"]
            return {str(model["id"]): model.get("parent") for model in models}
        except aiohttp.ClientConnectorError as error:
            raise BenchError(self._no_server(error)) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BenchError(f"{self._root}/v1/models: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BenchError(f"{self._root}/v1/models: not an OpenAI model list") from error

    async def _stream(self, request: BenchRequest, tally: StreamTally) -> None:
        url = f"{self._root}/v1/completions"
        async with self._session.post(url, data=request.body) as response:
            if response.status != 200:
                tally.error = f"HTTP {response.status}: {error_text(await response.read())}"
                return
            async for data in response.content.iter_any():
                tally.feed(data, self.clock())
            tally.close()

    def _no_server(self, error: aiohttp.ClientConnectorError) -> str:
        """Return a message with the system's own reason, which asyncio replaces by the addresses it has
        tried."""
        found, number = error.os_error, error.os_error.errno
        if number is None or isinstance(found, socket.gaierror):  # name lookups have their own numbers
            return no_server(self._root, found)
        return no_server(self._root, f"[Errno {number}] {os.strerror(number)}")

    def _record(self, request: BenchRequest, tally: StreamTally, arrival_s: float) -> RequestRecord:
        error = tally.error
        if error is None and tally.output_tokens != request.output_tokens:
            # A short answer would look like a fast one in every figure of the report.
            error = f"asked for {request.output_tokens} tokens, got {tally.output_tokens}"
        if error is None and not tally.chunk_times_s:
            error = "usage came, but no token did"
        return RequestRecord(
            model=request.model,
            prompt_tokens=request.prompt_tokens,
            output_tokens=tally.output_tokens or 0,
            arrival_s=arrival_s,
            token_times_s=tuple(tally.chunk_times_s),
            finish_s=tally.chunk_times_s[-1] if error is None else self.clock(),
            error=error,
        )
