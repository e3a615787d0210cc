"""Reads schemas and expressions where their notation leaves a choice, or where models go astray."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any, Final

JSON_WHITESPACE: Final = r"[ \t\r\n]{0,32}"
"""Whitespace between the tokens of JSON. It has an end: models without an idea of how to go on would write it
up to max_tokens."""

_CLASSES: Final = {"d": "0-9", "w": "0-9A-Za-z_"}
_MANY_PARTS: Final = ("allOf", "if", "dependentSchemas", "unevaluatedProperties")
_SAY_MORE: Final = ("additionalProperties", "patternProperties")
_MOST_REMAINDERS: Final = 30_000
"""States that llguidance may make to divide by `multipleOf`: this many take a fifth of a second."""
_MOST_BOUNDED: Final = 1_000
"""The same for numbers with bounds, each digit of which multiplies the states."""
_BOUNDS: Final = ('"minimum"', '"maximum"', '"exclusiveMinimum"', '"exclusiveMaximum"')
_MOST_DIGITS: Final = 7
"""Digits of a number that suffice to see that it is above that."""
_REPEATED: Final = ("*", "+", ",}")
_MOST_REPETITIONS: Final = 1_000
"""These take a third of a second."""
_ESCAPED: Final = re.compile(r"\\u([0-9a-fA-F]{4})")
_MULTIPLE: Final = re.compile(r'"multipleOf"\s*:\s*([0-9.eE+-]+)')


def closed_schema(text: str) -> str:
    """Return a schema whose objects have the properties that it names, and no others.

    Whatever follows it follows the given one too. Left free to add properties, models often add them without
    end. Not for a schema in which several parts describe one object: each would forbid the others'
    properties. Patterns in it are read by `ascii_classes`."""
    try:
        schema = json.loads(text)
        return json.dumps(_closed(schema, closes=not _has_many_parts(schema)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text  # the compiler says what is wrong


def ascii_classes(pattern: str) -> str:
    r"""Return a regular expression in which \d and \w are digits and letters of ASCII."""
    parts: list[str] = []
    in_class, place = False, 0
    while place < len(pattern):
        char = pattern[place]
        if char == "\\":
            escaped = pattern[place + 1 : place + 2]
            known = _CLASSES.get(escaped)
            parts.append(char + escaped if known is None else known if in_class else f"[{known}]")
            place += 2
            continue
        if in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
            begins = pattern[place : place + 3]  # a bracket at the beginning of a class is part of it
            first = "[^]" if begins == "[^]" else "[]" if begins[:2] == "[]" else "["
            parts.append(first)
            place += len(first)
            continue
        parts.append(char)
        place += 1
    return "".join(parts)


def ends_in_escape(pattern: str) -> bool:
    """Return whether a regular expression ends in a backslash that escapes nothing."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def refuse_large_multiples(text: str) -> None:
    """Raise ValueError if a schema, or a grammar that contains schemas, divides by numbers that take too much
    work. llguidance has no limit for that, and cannot be interrupted.

    Several may have to divide one number, by `allOf`, `$ref` or patterns of properties: all are taken to.
    """
    text = _ESCAPED.sub(lambda code: chr(int(code[1], 16)), text)
    divisors: list[int] = []
    for found in _MULTIPLE.findall(text):
        with suppress(InvalidOperation):  # the compiler says what is wrong
            digits = Decimal(found).normalize().as_tuple().digits
            divisors.append(int("".join(map(str, digits[:_MOST_DIGITS]))) or 1)
    most = _MOST_BOUNDED if any(each in text for each in _BOUNDS) else _MOST_REMAINDERS
    if max(math.lcm(*divisors), sum(divisors)) > most:
        raise ValueError(
            "multipleOf takes too much work; use numbers whose sum and least common multiple are up to "
            f"{most:,}, their trailing zeros left out, or leave it out and check the answer"
        )


def refuse_many_repetitions(text: str) -> None:
    """Raise ValueError if an expression, or a schema with expressions, repeats too often without an end. The
    work for that grows with the square, before any limit of llguidance."""
    num_repetitions = sum(map(text.count, _REPEATED))
    if num_repetitions > _MOST_REPETITIONS:
        raise ValueError(
            f"it repeats {num_repetitions:,} times with * and +; use up to {_MOST_REPETITIONS:,} of them"
        )


def _has_many_parts(schema: Any) -> bool:
    if isinstance(schema, dict):
        return any(key in _MANY_PARTS or _has_many_parts(value) for key, value in schema.items())
    return isinstance(schema, list) and any(map(_has_many_parts, schema))


def _closed(schema: Any, *, closes: bool) -> Any:
    if isinstance(schema, list):
        return [_closed(each, closes=closes) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {
        key: value if key in ("enum", "const", "default", "examples") else _closed(value, closes=closes)
        for key, value in schema.items()
    }
    if isinstance(found.get("pattern"), str):
        found["pattern"] = ascii_classes(found["pattern"])
    if closes and isinstance(found.get("properties"), dict) and not any(key in found for key in _SAY_MORE):
        found["additionalProperties"] = False
    return found
