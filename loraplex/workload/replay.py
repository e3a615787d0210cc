"""Reads traces of single requests: Azure's LLM inference traces, and the VTC artifact's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from loraplex.workload.errors import WorkloadError
from loraplex.workload.jsonl import WorkloadFile
from loraplex.workload.table import Column, column_names, number, read_table, whole

_ARRIVAL: Final = Column(name="arrival_s", parse=number())
_LENGTHS: Final = (
    Column(name="prompt_tokens", parse=whole(1)),
    Column(name="output_tokens", parse=whole(1)),
)
# Azure's own column names, in files with a TIMESTAMP.
_AZURE_LENGTHS: Final = (
    Column(name="ContextTokens", parse=whole(1)),
    Column(name="GeneratedTokens", parse=whole(1)),
)


class TraceRow(NamedTuple):
    """A request of a trace; `adapter` is None if the trace has none."""

    line: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: int | None


Rows = Callable[[], Iterator[TraceRow]]


def read_azure(path: Path) -> Iterator[TraceRow]:
    """Read columns arrival_s, prompt_tokens, output_tokens; or Azure's own TIMESTAMP, ContextTokens,
    GeneratedTokens, with times counted from the first."""
    if "TIMESTAMP" in column_names(path):
        rows = _since_first(path)
    else:
        rows = read_table(path, (_ARRIVAL, *_LENGTHS))
    for line, (arrival_s, prompt, output) in _in_order(path, rows):
        yield TraceRow(line, arrival_s, prompt, output, None)


def read_vtc(path: Path) -> Iterator[TraceRow]:
    """Read columns arrival_s, adapter, prompt_tokens, output_tokens; the adapter is the client's number."""
    columns = (_ARRIVAL, Column(name="adapter", parse=whole(0)), *_LENGTHS)
    for line, (arrival_s, adapter, prompt, output) in _in_order(path, read_table(path, columns)):
        yield TraceRow(line, arrival_s, prompt, output, adapter)


def read_times_s(path: Path) -> Iterator[float]:
    """Return the arrival times of a workload file, or of a table with arrival_s or TIMESTAMP."""
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        return (request.arrival_s for request in WorkloadFile(path))
    if "TIMESTAMP" in column_names(path):
        return (row.arrival_s for row in read_azure(path))
    return (row[0] for _, row in _in_order(path, read_table(path, (_ARRIVAL,))))


def _since_first(path: Path) -> Iterator[tuple[int, tuple[Any, ...]]]:
    first: datetime | None = None
    for line, (time, prompt, output) in read_table(
        path, (Column(name="TIMESTAMP", parse=_timestamp), *_AZURE_LENGTHS)
    ):
        first = first or time
        try:
            yield line, ((time - first).total_seconds(), prompt, output)
        except TypeError as error:  # one has a time zone, the other has none
            raise WorkloadError(f"{path}:{line}: TIMESTAMP is of another form than those above it") from error


def _timestamp(value: str) -> datetime:
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("must be a time like 2023-11-16 18:15:46.680590") from None


def _in_order(
    path: Path, rows: Iterator[tuple[int, tuple[Any, ...]]]
) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Yield rows, which begin with their time; WorkloadError if times are out of order or there are none."""
    last_s: float | None = None
    for line, row in rows:
        if last_s is not None and row[0] < last_s:
            raise WorkloadError(f"{path}:{line}: arrival_s {row[0]} is before the line above it")
        last_s = row[0]
        yield line, row
    if last_s is None:
        raise WorkloadError(f"{path}: no requests in it")
