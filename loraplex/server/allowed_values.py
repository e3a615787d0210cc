"""Words for what a field of a request may be, by the type that it is decoded into.

msgspec names the place of a wrong value and the one rule that it breaks, in terms of Python. Clients are told
all that is allowed there instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec import UNSET, inspect

from loraplex.core.words import plural

_STEP: Final = re.compile(r"\[([^\]]*)\]|([^.\[\]]+)")
MAX_QUOTED_CHARS: Final = 100
"""Most characters of a client's text that a message quotes."""
_TYPES: Final[dict[type[Any], inspect.Type]] = {}
"""Types by the class that was looked at: for a chat request, that takes ten milliseconds."""


def allowed_at(kind: type[Any], path: str, values: Sequence[Any], *, for_key: bool = False) -> str | None:
    """Return in words what is allowed at a path such as `messages[0].role`; None if nothing is known of it.
    `kind`: what the whole is decoded into. `values`: what came, as `values_along` returns it. `for_key`: a
    key of the object there is meant."""
    if kind not in _TYPES:
        _TYPES[kind] = inspect.type_info(kind)
    found: Iterable[inspect.Type] = [_TYPES[kind]]
    for (index, name), outer in zip(_steps(path), values, strict=False):  # the last value is what is meant
        found = [inner for each in _tagged(found, outer, name) for inner in _inside(each, index, name)]
    if for_key:
        found = [each.key_type for each in _alternatives(found) if isinstance(each, inspect.DictType)]
    words = list(dict.fromkeys(word for each in _alternatives(found) for word in _words(each)))
    if len(words) > 1 and "null" in words:
        words.remove("null")  # it stands for leaving the field out
    return _joined(words) if words else None


def values_along(whole: Any, path: str) -> list[Any]:
    """Return the whole, and what each step of a path leads to: UNSET if that is not known."""
    values = [whole]
    for index, name in _steps(path):
        try:
            values.append(values[-1][name if index is None else int(index)])
        except (ValueError, LookupError, TypeError):
            values.append(UNSET)
    return values


def _steps(path: str) -> Iterator[tuple[str | None, str]]:
    """Yield the index or the name of each step of a path. An item of an object, `[...]`, has the index
    `...`."""
    for match in _STEP.finditer(path):
        yield match[1], match[2]


def _alternatives(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for each in types:
        match each:
            case inspect.UnionType(types=inner):
                yield from _alternatives(inner)
            case inspect.Metadata(type=inner):
                yield from _alternatives([inner])
            case _:
                yield each


def _tagged(types: Iterable[inspect.Type], value: Any, name: str) -> list[inspect.Type]:
    """Return the alternatives of a value, one of whose fields is meant: of several structs with a tag only
    the one that the value names, as the others have other rules. All of them have the tag itself."""
    found = list(_alternatives(types))
    structs = [each for each in found if isinstance(each, inspect.StructType)]
    if len(structs) < 2 or name == (field := structs[0].tag_field):
        return found
    tag = value.get(field, UNSET) if isinstance(value, dict) else UNSET
    return [each for each in structs if each.tag == tag]


def _inside(outer: inspect.Type, index: str | None, name: str) -> Iterator[inspect.Type]:
    """Yield the types of what is one step inside a type."""
    match outer:
        case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag) if index is None:
            yield from (each.type for each in fields if each.encode_name == name)
            if tag_field == name:
                yield inspect.LiteralType((tag,))
        case inspect.ListType(item_type=inner) if index is not None:
            yield inner
        case inspect.DictType(value_type=inner):
            yield inner


def _words(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.BoolType():
            yield "true or false"
        case inspect.NoneType():
            yield "null"
        case inspect.LiteralType(values=values) | inspect.EnumType(cls=values):
            yield from (quoted(getattr(each, "value", each)) for each in values)
        case inspect.IntType():
            yield "a whole number" + _range(kind)
        case inspect.FloatType():
            yield "a number" + _range(kind)
        case inspect.StrType(pattern=str(pattern)):
            yield f"a string that matches {pattern}"
        case inspect.StrType(min_length=least, max_length=most):
            yield "a string" + _lengths(least, most, "character")
        case inspect.ListType(min_length=least, max_length=most):
            yield "a list" + _lengths(least, most, "item")
        case inspect.DictType(min_length=least, max_length=most):
            yield "an object" + _lengths(least, most, "key")
        case inspect.StructType():
            yield "an object"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    above, least, most = kind.gt, kind.ge, kind.le
    if least is not None and most is not None:
        return f" from {_number(least)} to {_number(most)}"
    bounds = [] if above is None else [f"above {_number(above)}"]
    bounds += [] if least is None else [f"of at least {_number(least)}"]
    bounds += [] if most is None else [f"{'' if bounds else 'of '}at most {_number(most)}"]
    return " " + " and ".join(bounds) if bounds else ""


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _lengths(least: int | None, most: int | None, noun: str) -> str:
    if most is None:
        return f" of at least {least:,} {plural(noun, least)}" if least else ""
    if most == 0:
        return " that is empty"
    return f" of {f'{least:,} to' if least else 'at most'} {most:,} {plural(noun, most)}"


def quoted(value: Any) -> str:
    """Return a value as it is quoted in a message: short ones whole."""
    match value:
        case list():
            return f"a list of {len(value):,} {plural('item', len(value))}" if value else "an empty list"
        case dict():
            return f"an object of {len(value):,} {plural('key', len(value))}" if value else "an empty object"
        case str() if len(value) <= MAX_QUOTED_CHARS:
            return repr(value)
        case str():
            return f"a string of {len(value):,} characters"
        case _:
            text = json.dumps(value)
            return text if len(text) <= MAX_QUOTED_CHARS else "one of many digits"


def _joined(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
