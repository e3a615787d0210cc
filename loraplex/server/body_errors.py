"""Words for what is wrong with the body or the query of a request: where, what came, and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET

from loraplex.core.errors import InvalidRequestError
from loraplex.server.allowed_values import MAX_QUOTED_CHARS, allowed_at, quoted, values_along
from loraplex.server.requests import NOT_SUPPORTED, SUPPORTED_VALUES

_NOT_NUMBERS: Final = re.compile(rb"[:\[,]\s*-?(?:NaN|Infinity)\b")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_AROUND_BYTES: Final = 64
_DECODED_AGAIN_BYTES: Final = 2**17
_ESCAPE_BYTES: Final = len(rb"\ud83d")
_HIGH: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")
_LOW: Final = re.compile(rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BEGINNING_OF_LOW: Final = re.compile(rb"(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]{0,2})?)?)?)?")
_LOCATION: Final = re.compile(r" - at `(key` in `)?\$\.?([^`]*)`$")
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_VALUE: Final = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_PATH_PART: Final = re.compile(r"[^.\[\]]+")
_MISSING_FIELD: Final = re.compile(r"Object missing required field `(.*)`")
_EMPTY: Final = re.compile(r"Expected `(array|str)` of length >= 1")
_INDEX: Final = re.compile(r"\[[^\]]*\]")


def not_json(body: bytes | bytearray, message: str) -> InvalidRequestError:
    """Return the error for a body that is not JSON. `message`: the decoder's error, with the position it
    stopped at."""
    if (lone := _lone_surrogate(body, message)) is not None:
        return InvalidRequestError(
            f"the body is not valid JSON: {lone} is half of a character (a lone surrogate); send both "
            "halves, or the character itself in UTF-8"
        )
    return InvalidRequestError(f"the body is not valid JSON: {message}{_json_hint(body, message)}")


def _lone_surrogate(body: bytes | bytearray, message: str) -> str | None:
    """Return the escape that made the decoder stop, if that is why. However long the body is, only the bytes
    around that place are searched."""
    place = _BYTE.search(message)
    if place is None:
        return _lone_at_the_end(body[-_AROUND_BYTES:]) if "truncated" in message else None
    if "surrogate" not in message:
        return None
    stop = int(place[1])
    last = body[stop - _ESCAPE_BYTES : stop]
    if "unexpected end" in message or _LOW.fullmatch(last):
        return last.decode()
    return body[stop - 2 * _ESCAPE_BYTES : stop - _ESCAPE_BYTES].decode()  # what follows it is no low one


def _lone_at_the_end(tail: bytes | bytearray) -> str | None:
    """Return a high surrogate that nothing follows which could begin a low one. The decoder takes as many
    bytes as that has, and reports fewer as an end of the text."""
    for high in _HIGH.finditer(tail, max(len(tail) - 2 * _ESCAPE_BYTES + 1, 0)):
        before = tail[: high.start()]
        is_escaped = (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
        if not is_escaped and not _BEGINNING_OF_LOW.fullmatch(tail, high.end()):
            return high[0].decode()
    return None


def _json_hint(body: bytes | bytearray, message: str) -> str:
    """Return a hint at what is probably wrong."""
    if not body or body.isspace():
        return " (it is empty)"
    place = _BYTE.search(message)
    at = 0 if place is None else int(place[1])
    if _NOT_NUMBERS.search(body[max(at - _AROUND_BYTES, 0) : at + _AROUND_BYTES]):
        return " (NaN and Infinity are not JSON; leave the field out)"
    return ""


def decode_again(text: bytes | bytearray | msgspec.Raw) -> Callable[[], Any] | None:
    """Return what decodes a text to quote what is wrong in it; None if that would take more than about a
    millisecond."""
    if memoryview(text).nbytes > _DECODED_AGAIN_BYTES:
        return None
    return partial(msgspec.json.decode, text)


def explain(
    message: str, kind: type[msgspec.Struct], whole: Callable[[], Any] | None, part: str = ""
) -> InvalidRequestError:
    """Return msgspec's error with the field named as OpenAI does: `messages[0].content`. `kind`: what was
    decoded; `whole`: returns it as it came, None if nothing of it is to be quoted; `part`: where that is
    in the body."""
    location = _LOCATION.search(message)
    path = location[2] if location else ""
    where = _join(part, path)
    what = message[: location.start()] if location else message
    unknown = _UNKNOWN_FIELD.search(what)
    inner = _join(where, unknown[1]) if unknown and unknown[1] in NOT_SUPPORTED else where
    if refusal := _not_supported(inner):
        return refusal
    if unknown:
        name = unknown[1][:MAX_QUOTED_CHARS]
        near = difflib.get_close_matches(name, kind.__struct_encode_fields__, n=1) if not where else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return InvalidRequestError(f"unknown field {_join(where, name)!r}{hint}", param=_join(where, name))
    if missing := _MISSING_FIELD.search(what):
        name = _join(where, missing[1])
        return InvalidRequestError(f"{name} is missing", param=name)
    if empty := _EMPTY.fullmatch(what):
        least = "item" if empty[1] == "array" else "character"
        return InvalidRequestError(f"{where} is empty; give at least one {least}", param=where)
    advice = SUPPORTED_VALUES.get(_INDEX.sub("", where))
    if advice is not None and (wrong := _WRONG_VALUE.search(what)):
        value = wrong[1][:MAX_QUOTED_CHARS]
        return InvalidRequestError(
            f"`{where}` {value} is not supported by this server; {advice}", param=where
        )
    is_key = location is not None and location[1] is not None
    values = values_along(_came(whole), path)
    allowed = allowed_at(kind, path, values, for_key=is_key)
    if allowed is None:
        return InvalidRequestError(f"{where}: {what}" if where else what, param=where or None)
    came = None if is_key or values[-1] is UNSET else quoted(values[-1])
    name = f"a key of {where}" if is_key else where or "the body"
    instead = "" if came is None else f", not {came}"
    return InvalidRequestError(f"{name} must be {allowed}{instead}", param=where or None)


def _came(whole: Callable[[], Any] | None) -> Any:
    try:
        return UNSET if whole is None else whole()
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return UNSET  # there is a mistake in what follows, too


def _not_supported(where: str) -> InvalidRequestError | None:
    """Return the refusal of a path that leads to, or into, an unsupported field; None if there is none."""
    for part in _PATH_PART.finditer(where):
        if advice := NOT_SUPPORTED.get(part[0]):
            field = where[: part.end()]
            return InvalidRequestError(f"`{field}` is not supported by this server; {advice}", param=field)
    return None


def _join(where: str, name: str) -> str:
    if name.startswith("["):
        return where + name
    return f"{where}.{name}" if where and name else where or name
