"""Reading a request body: bounded in size and time, then decoded strictly."""

from __future__ import annotations

import asyncio
import difflib
import re
from dataclasses import dataclass
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request

from loraplex.core.errors import InvalidRequestError
from loraplex.server.errors import BodyTimeoutError, BodyTooLargeError, BusyError
from loraplex.server.json_size import JsonSize, json_size
from loraplex.server.requests import NOT_SUPPORTED, SUPPORTED_VALUES

T = TypeVar("T", bound=msgspec.Struct)

_NOT_NUMBERS: Final = re.compile(rb"[:\[,]\s*-?(?:NaN|Infinity)\b")
_LOCATION: Final = re.compile(r" - at `(?:key` in `)?\$\.?([^`]*)`$")
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_VALUE: Final = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_PATH_PART: Final = re.compile(r"[^.\[\]]+")
_MISSING_FIELD: Final = re.compile(r"Object missing required field `(.*)`")
_MAX_QUOTED_CHARS: Final = 100
_COUNTED_ABOVE_BYTES: Final = 2**17
"""Smaller bodies are decoded in about a millisecond, whatever they hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """`max_held_bytes`: of all bodies together that are being received. `max_values`: strings, numbers and
    the like in one body; `max_objects`: of those, objects."""

    max_body_bytes: int = 4 * 2**20
    max_values: int = 2**18
    max_objects: int = 2**14
    read_timeout_s: float = 60.0
    max_held_bytes: int = 512 * 2**20


class BodyReader:
    """Reads the bodies of one server's requests."""

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._held_bytes = 0

    async def read(self, request: Request, kind: type[T]) -> T:
        """The request's body as a `kind`; raises what `errors.describe` turns into 400, 408, 413 or 503."""
        body = await self._read_bytes(request)
        if len(body) > _COUNTED_ABOVE_BYTES:
            self._check_size(await asyncio.to_thread(json_size, body))
        return decode_struct(body, kind)

    def _check_size(self, size: JsonSize) -> None:
        limits = self._limits
        for count, limit, kind in (
            (size.num_objects, limits.max_objects, "objects"),
            (size.num_commas, limits.max_values, "values"),
        ):
            if count > limit:
                raise BodyTooLargeError(
                    f"the request body holds more than the {limit:,} JSON {kind} a request may have; "
                    "send it in several requests"
                )

    async def _read_bytes(self, request: Request) -> bytes:
        limits = self._limits
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limits.max_body_bytes:
            raise _too_large(limits)
        parts: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(limits.read_timeout_s):
                async for part in request.stream():
                    num_bytes += len(part)
                    self._held_bytes += len(part)
                    if num_bytes > limits.max_body_bytes:
                        raise _too_large(limits)
                    if self._held_bytes > limits.max_held_bytes:
                        raise BusyError("too many large requests are being received; try again")
                    parts.append(part)
        except TimeoutError:
            raise BodyTimeoutError(
                f"the request body did not arrive within {limits.read_timeout_s:g} seconds"
            ) from None
        finally:
            self._held_bytes -= num_bytes
        return b"".join(parts)


def decode_struct(body: bytes, kind: type[T]) -> T:
    """Decode JSON strictly; InvalidRequestError says what is wrong and where."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}{_json_hint(body)}") from None
    except UnicodeError:
        raise InvalidRequestError("the body is not valid UTF-8") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None


def _json_hint(body: bytes) -> str:
    """What people send most often that is not JSON."""
    if not body.strip():
        return " (it is empty)"
    if _NOT_NUMBERS.search(body):
        return " (NaN and Infinity are not JSON; leave the field out)"
    if b"\\ud" in body or b"\\uD" in body:
        return " (lone surrogates are not characters)"
    return ""


def _too_large(limits: BodyLimits) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the request body is larger than the {limits.max_body_bytes:,} bytes a request may have; shorten it"
    )


def _explain(message: str, kind: type[msgspec.Struct]) -> InvalidRequestError:
    """msgspec's message with the field's name in OpenAI's way: `messages[0].content`."""
    location = _LOCATION.search(message)
    where = location[1] if location else ""
    what = message[: location.start()] if location else message
    unknown = _UNKNOWN_FIELD.search(what)
    path = _join(where, unknown[1]) if unknown and unknown[1] in NOT_SUPPORTED else where
    if refusal := _not_supported(path):
        return refusal
    if unknown:
        name = unknown[1][:_MAX_QUOTED_CHARS]
        near = difflib.get_close_matches(name, kind.__struct_encode_fields__, n=1) if not where else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return InvalidRequestError(f"unknown field {_join(where, name)!r}{hint}", param=_join(where, name))
    if missing := _MISSING_FIELD.search(what):
        name = _join(where, missing[1])
        return InvalidRequestError(f"{name} is missing", param=name)
    advice = SUPPORTED_VALUES.get(where.rpartition(".")[2])
    if advice is not None and (wrong := _WRONG_VALUE.search(what)):
        value = wrong[1][:_MAX_QUOTED_CHARS]
        return InvalidRequestError(
            f"`{where}` {value} is not supported by this server; {advice}", param=where
        )
    return InvalidRequestError(f"{where}: {what}" if where else what, param=where or None)


def _not_supported(where: str) -> InvalidRequestError | None:
    """The refusal of a path that leads to, or into, a field that is not supported."""
    for part in _PATH_PART.finditer(where):
        if advice := NOT_SUPPORTED.get(part[0]):
            field = where[: part.end()]
            return InvalidRequestError(f"`{field}` is not supported by this server; {advice}", param=field)
    return None


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
