"""The lines of a batch's input: found, checked and put in order. Files are read in a thread."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, Final, Literal

import msgspec
from msgspec import Meta

from loraplex.core.tenants import BATCH_PRIORITY
from loraplex.server.batches.objects import BatchError
from loraplex.server.body_errors import decode_again, explain
from loraplex.server.decoders import decode_json

MAX_ERRORS: Final = 100
"""Broken lines that are named; the others are counted."""


class _Line(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    """The fields of a request that a batch decides by; the route checks all of them."""

    model: str
    stream: bool | None = None
    adapter_id: str | None = None


@dataclass(frozen=True, slots=True)
class InputLine:
    """One request. `offset` and `num_bytes`: its place in the file."""

    number: int
    custom_id: str
    model: str
    offset: int
    num_bytes: int


class InputError(Exception):
    """The input is not fit to be run."""

    def __init__(self, errors: list[BatchError]) -> None:
        super().__init__(errors[0].message)
        self.errors = errors

    @classmethod
    def of(cls, code: str, message: str, param: str | None = None) -> InputError:
        """Return one error, about the whole file."""
        return cls([BatchError(code=code, message=message, param=param)])


def read_input(path: Path, endpoint: str, *, max_lines: int, max_line_bytes: int) -> list[InputLine]:
    """Return the requests of a file; blank lines are none. Raises InputError and OSError."""
    errors: list[BatchError] = []
    num_broken = 0
    lines: list[InputLine] = []
    first_of: dict[str, int] = {}
    with path.open("rb") as file:
        for number, offset, text in _lines(file, max_line_bytes):
            try:
                if text is None:
                    raise InputError.of(
                        "line_too_long", f"is longer than the {max_line_bytes:,} bytes allowed"
                    )
                line = _parse(text, endpoint, number, offset)
                if (before := first_of.setdefault(line.custom_id, number)) != number:
                    repeated = f"has the custom_id of line {before}: {line.custom_id[:64]!r}"
                    raise InputError.of("duplicate_custom_id", repeated, "custom_id")
            except InputError as error:
                num_broken += 1
                if len(errors) < MAX_ERRORS:
                    [found] = error.errors
                    message = f"line {number} {found.message}"
                    errors.append(msgspec.structs.replace(found, line=number, message=message))
                continue
            lines.append(line)
            if len(lines) > max_lines:
                raise InputError.of(
                    "too_many_requests",
                    f"the file has more than the {max_lines:,} requests a batch may have; split it",
                )
    if num_broken > len(errors):
        more = f"{num_broken - len(errors):,} more lines are broken"
        errors.append(BatchError(code="more_errors", message=more))
    if errors:
        raise InputError(errors)
    if not lines:
        raise InputError.of("empty_file", "the file has no requests; each line is one, as JSON")
    return lines


def request_body(raw: bytes) -> tuple[str, bytes]:
    """Return a line's URL and the body to send, with the priority of batches."""
    line = decode_json(raw, _Line)
    # Of a field that is given twice, the last one counts: the body need not be decoded here.
    return line.url, bytes(line.body).rstrip()[:-1] + b',"priority":%d}' % BATCH_PRIORITY


def by_adapter(lines: Iterable[InputLine], num_at_once: int) -> Iterator[InputLine]:
    """Yield the lines with few adapters at a time: each is loaded once, however they are mixed in the file,
    and with several at a time all replicas of a fleet have work."""
    groups: dict[str, list[InputLine]] = {}
    for line in lines:
        groups.setdefault(line.model, []).append(line)
    waiting = deque(iter(group) for group in groups.values())
    active: deque[Iterator[InputLine]] = deque()
    while active or waiting:
        while waiting and len(active) < num_at_once:
            active.append(waiting.popleft())
        group = active.popleft()
        following = next(group, None)
        if following is not None:
            yield following
            active.append(group)


def _lines(file: IO[bytes], max_bytes: int) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield number, offset and text of each line; None for one that is too long, which is not kept."""
    number = offset = 0
    if file.read(len(BOM_UTF8)) == BOM_UTF8:  # as editors on Windows write
        offset = len(BOM_UTF8)
    else:
        file.seek(0)
    while text := file.readline(max_bytes + 2):
        number += 1
        num_bytes = len(text)
        is_whole = len(text.rstrip(b"\r\n")) <= max_bytes
        while not text.endswith(b"\n") and (text_after := file.readline(max_bytes + 2)):
            num_bytes += len(text_after)
            is_whole, text = False, text_after
        if not is_whole:
            yield number, offset, None
        elif text.strip():
            yield number, offset, text
        offset += num_bytes


def _parse(text: bytes, endpoint: str, number: int, offset: int) -> InputLine:
    try:
        line = decode_json(text, _Line)
    except msgspec.ValidationError as error:
        wrong = explain(str(error), _Line, decode_again(text))
        raise InputError.of("invalid_line", f"is not a request: {wrong}", wrong.param) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InputError.of("invalid_json_line", f"is not valid JSON: {error}") from None
    if line.url != endpoint:
        other = f"is for {line.url[:64]!r}, and the batch for {endpoint}; make a batch for each endpoint"
        raise InputError.of("mismatched_endpoint", other, "url")
    try:
        body = decode_json(line.body, _Body)
    except msgspec.ValidationError as error:
        wrong = explain(str(error), _Body, decode_again(line.body), "body")
        raise InputError.of("invalid_body", f"has a wrong body: {wrong}", wrong.param) from None
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InputError.of("invalid_body", f"has a wrong body: {error}", "body") from None
    if body.stream:
        raise InputError.of("stream_not_supported", "asks for a stream; leave stream out", "body.stream")
    return InputLine(
        number=number,
        custom_id=line.custom_id,
        model=body.adapter_id or body.model,
        offset=offset,
        num_bytes=len(text),
    )
