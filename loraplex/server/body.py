"""Reading a request body: bounded in size and time, then decoded strictly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request

from loraplex.core.errors import EngineClosedError, InvalidRequestError
from loraplex.server.allowed_values import MAX_QUOTED_CHARS
from loraplex.server.body_errors import decode_again, explain, not_json
from loraplex.server.decoders import decode_json
from loraplex.server.engine_status import SHUTTING_DOWN
from loraplex.server.errors import BodyTimeoutError, BodyTooLargeError, BusyError, ContentEncodingError
from loraplex.server.json_size import JsonSize, json_size

T = TypeVar("T", bound=msgspec.Struct)

_COUNTED_ABOVE_BYTES: Final = 2**17
"""Size in bytes below which any body is decoded in about a millisecond, so its values are not counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """Limits on request bodies.

    `max_held_bytes`: total bytes of all bodies being received or whose prompts are being encoded.
    `max_values`: strings, numbers and so on in one body; `max_objects` and `max_lists` bound its objects and
    lists, each of which costs fifty times as much as a number.
    """

    max_body_bytes: int = 4 * 2**20
    max_values: int = 2**18
    max_objects: int = 2**14
    max_lists: int = 2**14
    read_timeout_s: float = 60.0
    max_held_bytes: int = 512 * 2**20


class BodyReader:
    """Reads the bodies of one server's requests."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._held_bytes = 0
        self._is_closed = False
        self._reads: set[asyncio.Timeout] = set()

    @property
    def max_body_bytes(self) -> int:
        return self._limits.max_body_bytes

    @property
    def read_timeout_s(self) -> float:
        return self._limits.read_timeout_s

    def close(self) -> None:
        """End the reads in progress: the server is shutting down, and a slow upload would delay that."""
        self._is_closed = True
        for read in self._reads:
            if not read.expired():
                read.reschedule(0.0)

    @asynccontextmanager
    async def read(self, request: Request, kind: type[T]) -> AsyncIterator[T]:
        """Yield the request's body as a `kind`. Its bytes count as held until the block ends.

        Raises what `errors.describe` turns into 400, 408, 413, 415 or 503.
        """
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity"):
            raise ContentEncodingError(
                f"the request body is compressed (Content-Encoding: {encoding[:MAX_QUOTED_CHARS]}), which "
                "this server does not decode; send it uncompressed"
            )
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            self._check_num_bytes(int(declared[:20]))
        body, num_bytes = bytearray(), 0
        try:
            async with self._read_timeout():
                async for part in request.stream():
                    num_bytes += len(part)
                    self._held_bytes += len(part)
                    self._check_num_bytes(num_bytes)
                    if self._held_bytes > self._limits.max_held_bytes:
                        raise BusyError("too many large requests are being received or encoded; try again")
                    body += part
            if num_bytes > _COUNTED_ABOVE_BYTES:
                self._check_size(await asyncio.to_thread(json_size, body))
            decoded = decode_struct(body, kind)
            del body  # free the raw bytes early
            yield decoded
        finally:
            self._held_bytes -= num_bytes

    def _check_size(self, size: JsonSize) -> None:
        limits = self._limits
        for count, limit, kind in (
            (size.num_objects, limits.max_objects, "objects"),
            (size.num_lists, limits.max_lists, "lists"),
            (size.num_commas, limits.max_values, "values"),
        ):
            if count > limit:
                raise BodyTooLargeError(
                    f"the request body holds more than the {limit:,} JSON {kind} a request may have; "
                    "send it in several requests"
                )

    def _check_num_bytes(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_body_bytes:
            raise BodyTooLargeError(
                f"the request body is larger than the {self._limits.max_body_bytes:,} bytes a request may "
                "have; shorten it"
            )

    @asynccontextmanager
    async def _read_timeout(self) -> AsyncIterator[None]:
        timeout_s = self._limits.read_timeout_s
        try:
            async with asyncio.timeout(0.0 if self._is_closed else timeout_s) as read:
                self._reads.add(read)
                try:
                    yield
                finally:
                    self._reads.discard(read)
        except TimeoutError:
            if self._is_closed:
                raise EngineClosedError(SHUTTING_DOWN) from None
            raise BodyTimeoutError(f"the request body did not arrive within {timeout_s:g} seconds") from None


def decode_struct(body: bytes | bytearray, kind: type[T]) -> T:
    """Decode JSON strictly. Raises InvalidRequestError that says what is wrong and where."""
    try:
        return decode_json(body, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind, decode_again(body)) from None
    except msgspec.DecodeError as error:
        raise not_json(body, str(error)) from None
    except UnicodeError:
        raise InvalidRequestError("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def read_query(request: Request, kind: type[T]) -> T:
    """Decode the query of a URL; parameters that are unknown have no effect. Raises InvalidRequestError."""
    known = {name: text for name, text in request.query_params.items() if name in kind.__struct_fields__}
    try:
        return msgspec.convert(known, kind, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind, lambda: known) from None


def convert_part(value: Any, kind: type[T], where: str) -> T:
    """Return a part of a body as a `kind`. Raises InvalidRequestError. `where`: the part's place in the
    body."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise explain(str(error), kind, lambda: value, where) from None
