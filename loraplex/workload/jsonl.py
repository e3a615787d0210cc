"""The workload file: one request a line, in order of arrival.

    {"arrival_s": 0.078, "prompt_tokens": 21, "output_tokens": 137, "adapter": 0}

`adapter` is an index; whoever replays the file takes it modulo the number of adapters in use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from loraplex.core.errors import UserError

KEYS = ("arrival_s", "prompt_tokens", "output_tokens", "adapter")


class WorkloadError(UserError):
    """A workload file that cannot be replayed as it is; the message names file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRequest:
    """One request. `arrival_s` counts from the start of the replay."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: int


def read_workload(path: Path) -> list[WorkloadRequest]:
    """Every request of the file. Blank lines are skipped; anything else that is odd is refused.

    A replay with a line misread or left out would measure another workload than the one named in
    the report, so there is no lenient mode.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{path}: not a UTF-8 text file ({error.reason} at byte {error.start})"
        ) from error

    requests: list[WorkloadRequest] = []
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            request = _parse_line(line)
            if requests and request.arrival_s < requests[-1].arrival_s:
                raise ValueError(f"arrival_s {request.arrival_s} is before the line above it")
        except ValueError as error:
            raise WorkloadError(f"{path}:{line_number}: {error}") from error
        requests.append(request)
    if not requests:
        raise WorkloadError(f"{path}: no requests in it")
    return requests


def write_workload(path: Path, requests: Iterable[WorkloadRequest]) -> None:
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in requests), encoding="utf-8")


def _parse_line(line: str) -> WorkloadRequest:
    try:
        fields = json.loads(line, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError:
        raise ValueError("not a workload request: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with {', '.join(KEYS)}")
    if missing := [key for key in KEYS if key not in fields]:
        unknown = [key for key in fields if key not in KEYS]
        instead = f"; instead there is {', '.join(unknown)}" if unknown else ""
        raise ValueError(f"missing {', '.join(missing)}{instead}")
    if unknown := [key for key in fields if key not in KEYS]:
        raise ValueError(f"unknown {', '.join(unknown)} (known: {', '.join(KEYS)})")
    return WorkloadRequest(
        arrival_s=_seconds(fields["arrival_s"]),
        prompt_tokens=_count("prompt_tokens", fields["prompt_tokens"], least=1),
        output_tokens=_count("output_tokens", fields["output_tokens"], least=1),
        adapter=_count("adapter", fields["adapter"], least=0),
    )


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is given twice")
    return fields


def _seconds(value: object) -> float:
    # bool is an int to Python, and NaN and Infinity are numbers to its JSON reader.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"arrival_s must be a number of seconds, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"arrival_s must be finite and not negative, not {value!r}")
    return seconds


def _count(key: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, not {value!r}")
    return value
