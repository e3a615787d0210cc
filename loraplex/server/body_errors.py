"""Words for what is wrong with the body or the query of a request: where, what came, and what is allowed."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any, Final

import msgspec

from loraplex.core.errors import InvalidRequestError
from loraplex.server.allowed_values import allowed_at, value_at
from loraplex.server.requests import NOT_SUPPORTED, SUPPORTED_VALUES

_NOT_NUMBERS: Final = re.compile(rb"[:\[,]\s*-?(?:NaN|Infinity)\b")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_AROUND_BYTES: Final = 64
_HIGH: Final = rb"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LONE_SURROGATE: Final = re.compile(
    # One that no low one follows, unless the text ends there, or a low one that follows none.
    rb"(?<!\\)(?:\\\\)*(" + _HIGH + rb")(?!\\u[dD][c-fC-F]|\\(?:u[dD]?)?\Z|\Z)"
    rb"|(?<!" + _HIGH.replace(rb"{2}", rb"[0-9a-fA-F]") + rb")(?<!\\)(?:\\\\)*(\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_LOCATION: Final = re.compile(r" - at `(key` in `)?\$\.?([^`]*)`$")
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WRONG_VALUE: Final = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_PATH_PART: Final = re.compile(r"[^.\[\]]+")
_MISSING_FIELD: Final = re.compile(r"Object missing required field `(.*)`")
_EMPTY: Final = re.compile(r"Expected `(array|str)` of length >= 1")
_INDEX: Final = re.compile(r"\[[^\]]*\]")
_MAX_QUOTED_CHARS: Final = 100


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
    """Return the escape that made the decoder stop, if that is why. It looks for the other half in the bytes
    that follow, and reports too few of them as an end of the text."""
    if "truncated" not in message and "surrogate" not in message:
        return None
    found = _LONE_SURROGATE.search(body)
    return None if found is None else (found[1] or found[2]).decode()


def _json_hint(body: bytes | bytearray, message: str) -> str:
    """Return a hint at what is probably wrong."""
    if not body.strip():
        return " (it is empty)"
    place = _BYTE.search(message)
    at = 0 if place is None else int(place[1])
    if _NOT_NUMBERS.search(body[max(at - _AROUND_BYTES, 0) : at + _AROUND_BYTES]):
        return " (NaN and Infinity are not JSON; leave the field out)"
    return ""


def explain(
    message: str, kind: type[msgspec.Struct], whole: Callable[[], Any], part: str = ""
) -> InvalidRequestError:
    """Return msgspec's error with the field named as OpenAI does: `messages[0].content`. `kind`: what was
    decoded; `whole`: returns it as it came; `part`: where that is in the body."""
    location = _LOCATION.search(message)
    path = location[2] if location else ""
    where = _join(part, path)
    what = message[: location.start()] if location else message
    unknown = _UNKNOWN_FIELD.search(what)
    inner = _join(where, unknown[1]) if unknown and unknown[1] in NOT_SUPPORTED else where
    if refusal := _not_supported(inner):
        return refusal
    if unknown:
        name = unknown[1][:_MAX_QUOTED_CHARS]
        near = difflib.get_close_matches(name, kind.__struct_encode_fields__, n=1) if not where else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return InvalidRequestError(f"unknown field {_join(where, name)!r}{hint}", param=_join(where, name))
    if missing := _MISSING_FIELD.search(what):
        name = _join(where, missing[1])
        return InvalidRequestError(f"{name} is missing", param=name)
    if empty := _EMPTY.fullmatch(what):
        least = "item" if empty[1] == "array" else "character"
        return InvalidRequestError(f"{where} is empty; give at least one {least}", param=where)
    advice = SUPPORTED_VALUES.get(_INDEX.sub("", where)) or SUPPORTED_VALUES.get(where.rpartition(".")[2])
    if advice is not None and (wrong := _WRONG_VALUE.search(what)):
        value = wrong[1][:_MAX_QUOTED_CHARS]
        return InvalidRequestError(
            f"`{where}` {value} is not supported by this server; {advice}", param=where
        )
    is_key = location is not None and location[1] is not None
    allowed = allowed_at(kind, path, for_key=is_key)
    if allowed is None:
        return InvalidRequestError(f"{where}: {what}" if where else what, param=where or None)
    came = None if is_key else _came(whole, path)
    name = f"a key of {where}" if is_key else where or "the body"
    instead = "" if came is None else f", not {came}"
    return InvalidRequestError(f"{name} must be {allowed}{instead}", param=where or None)


def _came(whole: Callable[[], Any], path: str) -> str | None:
    try:
        return value_at(whole(), path)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None  # there is a mistake in what follows, too


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
