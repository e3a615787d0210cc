"""Reduces a profiler's trace of one cold start to a few lanes of intervals, for a picture.

The host's marks and the device's work share the profiler's clock. Times are microseconds since the arrival of
the request.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

from loraplex.bench.cold_scenarios import LONG_GAP

ARRIVAL, STEP, FIRST_TOKEN, OTHERS_TOKENS = "arrival", "step", "first token", "others' tokens"
"""Marks of the host. The last one: the requests that were running before got a token each."""

COPIES, WAITS, COMPUTE = "adapter copies", "waits on the device", "compute"
WORKER_COPIES, WORKERS = "rows to and from workers", "rows at workers"
LANES: Final = (COPIES, WAITS, COMPUTE, WORKER_COPIES, WORKERS)

MERGE_US: Final = 20.0
"""Intervals of a lane that are closer than this are merged."""
_ROWS_BYTES: Final = 1 << 18
"""Least bytes of a copy to the host that carries rows to CPU workers; a step's tokens are far smaller. A
kernel fetches what comes back."""
_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRecord:
    """A mark of the host, or a kernel or copy of the device (`on_device`) on one of its streams."""

    name: str
    begin_us: float
    end_us: float
    on_device: bool = True
    stream: int | None = None
    num_bytes: int = 0

    @property
    def interval(self) -> Interval:
        return self.begin_us, self.end_us


def read_trace(path: Path) -> list[TraceRecord]:
    """Read a file that the profiler exported; unlike the profiler's own events, it has the bytes of
    copies."""
    records = []
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        category = event.get("cat")
        on_device = category in _ON_DEVICE
        if not on_device and category != "user_annotation":
            continue
        about = event.get("args", {})
        records.append(
            TraceRecord(
                name=event["name"],
                begin_us=event["ts"],
                end_us=event["ts"] + event["dur"],
                on_device=on_device,
                stream=about["stream"] if on_device else None,
                num_bytes=about["bytes"] if category == "gpu_memcpy" else 0,
            )
        )
    return records


def timeline_of(records: Sequence[TraceRecord], adapter_bytes: int) -> dict[str, Any]:
    """Return the parts of a trace that are kept, as JSON. `adapter_bytes`: bytes of the cold adapter."""
    marks: dict[str, list[Interval]] = defaultdict(list)
    for record in records:
        if not record.on_device:
            marks[record.name].append(record.interval)
    for name in (ARRIVAL, FIRST_TOKEN):
        assert len(marks[name]) == 1, f"{len(marks[name])} marks {name!r} in the trace"
    arrival_us = marks[ARRIVAL][0][0]
    token_times_us = sorted(begin - arrival_us for begin, _ in marks[OTHERS_TOKENS])
    usual_us, pauses_us = pauses(token_times_us)
    lanes = device_lanes([record for record in records if record.on_device], adapter_bytes)
    return {
        "adapter_bytes": adapter_bytes,
        "lanes": {name: _since(arrival_us, merged(lanes[name])) for name in LANES},
        "steps_us": _since(arrival_us, sorted(marks[STEP])),
        "first_token_us": round(marks[FIRST_TOKEN][0][0] - arrival_us, 1),
        "decode_token_times_us": [round(time_us, 1) for time_us in token_times_us],
        "usual_gap_us": round(usual_us, 1),
        "pauses_us": _since(0.0, pauses_us),
    }


def device_lanes(records: Iterable[TraceRecord], adapter_bytes: int) -> dict[str, list[Interval]]:
    """Return the device's work by lane."""
    ordered = sorted(records, key=lambda record: record.begin_us)
    bus = bus_stream(ordered, adapter_bytes)
    lanes: dict[str, list[Interval]] = {name: [] for name in LANES}
    sent_us: float | None = None
    for record in ordered:
        if record.stream == bus and bus is not None:
            lanes[COPIES].append(record.interval)
        elif "DtoH" in record.name and record.num_bytes >= _ROWS_BYTES:
            lanes[WORKER_COPIES].append(record.interval)
            sent_us = record.begin_us if sent_us is None else sent_us
        elif "_fetch" in record.name and sent_us is not None:
            lanes[WORKER_COPIES].append(record.interval)
            lanes[WORKERS].append((sent_us, record.end_us))
            sent_us = None
        elif _leaves_or_enters(record):
            continue
        else:
            lanes[WAITS if "_wait" in record.name else COMPUTE].append(record.interval)
    return lanes


def bus_stream(records: Iterable[TraceRecord], adapter_bytes: int) -> int | None:
    """Return the stream that copied the adapter; None if it was resident before."""
    carried: dict[int | None, int] = defaultdict(int)
    for record in records:
        if "HtoD" in record.name:
            carried[record.stream] += record.num_bytes
    most = max(carried, key=lambda stream: carried[stream], default=None)
    return most if 2 * carried[most] >= adapter_bytes else None


def merged(intervals: Iterable[Interval], closer_than_us: float = MERGE_US) -> list[Interval]:
    """Return the intervals in order, with those that overlap or nearly touch merged."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin - found[-1][1] < closer_than_us:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def pauses(token_times_us: Sequence[float]) -> tuple[float, list[Interval]]:
    """Return the usual gap between tokens before the arrival, and the gaps after it that are much longer."""
    before = [later - sooner for sooner, later in pairwise(token_times_us) if later <= 0]
    assert before, "too few tokens before the arrival to tell what is usual"
    usual_us = median(before)
    gaps = [(sooner, later) for sooner, later in pairwise(token_times_us) if later > 0]
    return usual_us, [(sooner, later) for sooner, later in gaps if later - sooner > LONG_GAP * usual_us]


def _leaves_or_enters(record: TraceRecord) -> bool:
    """Return whether this is a copy between host and device."""
    return "DtoH" in record.name or "HtoD" in record.name


def _since(zero_us: float, intervals: Iterable[Interval]) -> list[list[float]]:
    return [[round(begin - zero_us, 1), round(end - zero_us, 1)] for begin, end in intervals]


def calls_within(mark: str, events: Iterable[Any]) -> list[str]:
    """Return the CUDA runtime calls from the beginning of the mark to its end: the profiler itself waits for
    the device before and after it."""
    found = list(events)
    span = next(event.time_range for event in found if event.name == mark)
    return [
        event.name
        for event in found
        if event.name.startswith("cuda") and span.start <= event.time_range.start <= span.end
    ]
