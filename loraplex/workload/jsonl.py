"""The workload file: a header, then one request per line, in order of arrival; .gz or not.

    {"loraplex_workload": 1, "ranks": [8, 16], "names": [...], "duration_s": 60.0, "recipe": {...}}
    {"arrival_s": 0.078, "prompt_tokens": 21, "output_tokens": 137, "adapter": 0, "tenant": "acme"}

The header is optional, and so are all its fields but `ranks`, and a request's `tenant`. With a header,
`adapter` is an index into `ranks`; without one, a replay takes the index modulo the number of adapters in
use.

Reading is strict: a replay with a misread or skipped line would measure another workload than the one named
in the report.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from loraplex.core.tenants import NO_TENANT, TENANT_NAMES, TENANT_PATTERN, is_tenant_name
from loraplex.workload.errors import WorkloadError
from loraplex.workload.request import Scalar, Workload, WorkloadHeader, WorkloadRequest
from loraplex.workload.text_files import read_lines, write_text

__all__ = [
    "WorkloadError",
    "WorkloadFile",
    "WorkloadRequest",
    "read_workload",
    "save_workload",
    "write_workload",
]

VERSION: Final = 1
KEYS: Final = ("arrival_s", "prompt_tokens", "output_tokens", "adapter")
_TENANT_KEY: Final = "tenant"
_VERSION_KEY: Final = "loraplex_workload"
_LATEST_S: Final = 1e10
"""Latest arrival in seconds, about three centuries: beyond it, a float does not resolve a step's duration."""
_HEADER_KEYS: Final = (_VERSION_KEY, "ranks", "names", "duration_s", "recipe")
# A line exactly as `write_workload` writes it and with nothing in it to refuse is read without a JSON parser,
# which takes several times as long. All other lines are parsed strictly.
_PLAIN_LINE: Final = re.compile(
    r'\{"arrival_s": ((?:0|[1-9]\d{0,15})\.\d{1,17}), "prompt_tokens": ([1-9]\d{0,15}), '
    r'"output_tokens": ([1-9]\d{0,15}), "adapter": (0|[1-9]\d{0,15})'
    rf'(?:, "tenant": "({TENANT_PATTERN})")?\}}',
    re.ASCII,
)


class WorkloadFile:
    """A Workload in a file. The header is read now, the requests on each iteration."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header_line, self.header = _read_header(path)

    def __iter__(self) -> Iterator[WorkloadRequest]:
        """Yield the requests. Skips blank lines; raises WorkloadError with the line number for anything
        invalid."""
        last_s = -math.inf
        for number, line in _filled_lines(self.path):
            if number == self._header_line:
                continue
            try:
                request = _plain_request(line) or _request_of(_parse_object(line))
                if request.arrival_s > _LATEST_S:
                    raise ValueError(
                        f"arrival_s {request.arrival_s} is beyond {_LATEST_S:.0e} seconds, where times are "
                        "not exact any more; give seconds from the start"
                    )
                if request.arrival_s < last_s:
                    raise ValueError(f"arrival_s {request.arrival_s} is before the line above it")
                _check_with_header(request, self.header)
            except ValueError as error:
                raise WorkloadError(f"{self.path}:{number}: {error}") from error
            last_s = request.arrival_s
            yield request
        if last_s < 0:
            raise WorkloadError(f"{self.path}: no requests in it")


def read_workload(path: Path) -> list[WorkloadRequest]:
    """Return all requests of the file."""
    return list(WorkloadFile(path))


def write_workload(
    path: Path, requests: Iterable[WorkloadRequest], header: WorkloadHeader | None = None
) -> int:
    """Write requests as they are drawn and return their number. On an error no file is left behind."""
    number = 0
    with write_text(path) as file:
        if header is not None:
            file.write(_header_line(header))
        for number, request in enumerate(requests, start=1):  # noqa: B007
            file.write(_request_line(request))
        if number == 0:
            raise WorkloadError(f"{path}: not written, as there is not a single request for it")
    return number


def save_workload(path: Path, workload: Workload) -> int:
    """Write the workload with its header and return its number of requests."""
    return write_workload(path, workload, workload.header)


def _request_line(request: WorkloadRequest) -> str:
    # The same text as json.dumps in a fraction of the time: files of a million lines are common.
    return (
        f'{{"arrival_s": {request.arrival_s!r}, "prompt_tokens": {request.prompt_tokens}, '
        f'"output_tokens": {request.output_tokens}, "adapter": {request.adapter}'
        f"{_tenant_part(request.tenant)}}}\n"
    )


def _tenant_part(tenant: str) -> str:
    return f', "{_TENANT_KEY}": {json.dumps(tenant)}' if tenant else ""


def _header_line(header: WorkloadHeader) -> str:
    fields: dict[str, Any] = {_VERSION_KEY: VERSION, "ranks": header.ranks}
    if header.names is not None:
        fields["names"] = header.names
    if header.duration_s is not None:
        fields["duration_s"] = header.duration_s
    if header.recipe:
        fields["recipe"] = dict(header.recipe)
    return json.dumps(fields, allow_nan=False) + "\n"


def _filled_lines(path: Path) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in read_lines(path) if line.strip())


def _read_header(path: Path) -> tuple[int | None, WorkloadHeader | None]:
    """Return the header and its line number, or None for both if there is none."""
    number, line = next(_filled_lines(path), (0, ""))
    if not line:
        raise WorkloadError(f"{path}: no requests in it")
    try:
        fields = _parse_object(line)
        return (number, _header_of(fields)) if _VERSION_KEY in fields else (None, None)
    except (ValueError, WorkloadError) as error:
        raise WorkloadError(f"{path}:{number}: {error}") from error


def _header_of(fields: dict[str, Any]) -> WorkloadHeader:
    if (version := fields[_VERSION_KEY]) != VERSION or isinstance(version, bool):
        raise ValueError(f"{_VERSION_KEY} is {version!r}; this loraplex reads version {VERSION}")
    if unknown := [key for key in fields if key not in _HEADER_KEYS]:
        raise ValueError(f"unknown {', '.join(unknown)} in the header (known: {', '.join(_HEADER_KEYS)})")
    ranks, names, duration_s = (fields.get(key) for key in ("ranks", "names", "duration_s"))
    if not isinstance(ranks, list):
        raise ValueError("ranks must be a list with the rank of each adapter")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError("names must be a list of strings")
    return WorkloadHeader(
        ranks=tuple(_count("ranks", rank, least=1) for rank in ranks),
        names=None if names is None else tuple(names),
        duration_s=None if duration_s is None else _seconds("duration_s", duration_s),
        recipe=_recipe(fields.get("recipe", {})),
    )


def _recipe(value: object) -> dict[str, Scalar]:
    if not isinstance(value, dict) or not all(isinstance(each, Scalar) for each in value.values()):
        raise ValueError("recipe must be an object of plain values")
    return value


def _check_with_header(request: WorkloadRequest, header: WorkloadHeader | None) -> None:
    if header is None:
        return
    if request.adapter >= header.num_adapters:
        raise ValueError(
            f"adapter {request.adapter} is unknown: the header has {header.num_adapters}, counted from 0"
        )
    if header.duration_s is not None and request.arrival_s > header.duration_s:
        raise ValueError(
            f"arrival_s {request.arrival_s} is after the header's duration_s {header.duration_s}"
        )


def _plain_request(line: str) -> WorkloadRequest | None:
    if (found := _PLAIN_LINE.fullmatch(line)) is None:
        return None
    arrival_s, prompt_tokens, output_tokens, adapter, tenant = found.groups()
    return WorkloadRequest(
        arrival_s=float(arrival_s),
        prompt_tokens=int(prompt_tokens),
        output_tokens=int(output_tokens),
        adapter=int(adapter),
        tenant=tenant or NO_TENANT,
    )


def _parse_object(line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        # Some messages of the parser end in "at".
        message = error.msg.removesuffix(" at")
        raise ValueError(f"not JSON: {message} at column {error.colno}") from error
    except RecursionError:
        raise ValueError("not a workload request: nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object with {', '.join(KEYS)}")
    return fields


def _request_of(fields: dict[str, Any]) -> WorkloadRequest:
    if _VERSION_KEY in fields:
        raise ValueError("a header must be the first line")
    tenant = fields.pop(_TENANT_KEY, NO_TENANT)
    if not isinstance(tenant, str) or not (tenant == NO_TENANT or is_tenant_name(tenant)):
        raise ValueError(f"tenant must be a name of {TENANT_NAMES}")
    if fields.keys() != set(KEYS):
        _refuse_keys(fields)
    return WorkloadRequest(
        arrival_s=_seconds("arrival_s", fields["arrival_s"]),
        prompt_tokens=_count("prompt_tokens", fields["prompt_tokens"], least=1),
        output_tokens=_count("output_tokens", fields["output_tokens"], least=1),
        adapter=_count("adapter", fields["adapter"], least=0),
        tenant=tenant,
    )


def _refuse_keys(fields: dict[str, Any]) -> None:
    unknown = [key for key in fields if key not in KEYS]
    if missing := [key for key in KEYS if key not in fields]:
        instead = f"; instead there is {', '.join(unknown)}" if unknown else ""
        raise ValueError(f"missing {', '.join(missing)}{instead}")
    raise ValueError(f"unknown {', '.join(unknown)} (known: {', '.join((*KEYS, _TENANT_KEY))})")


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key is given twice")
    return fields


def _seconds(key: str, value: object) -> float:
    # bool is an int in Python, and its JSON reader accepts NaN and Infinity as numbers.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{key} must be a number of seconds, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(f"{key} must be finite and not negative, not {value!r}")
    return seconds


def _count(key: str, value: object, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key} must be a whole number of at least {least}, not {value!r}")
    return value
