"""Summarizes request records, as a table and as JSON.

    TTFT  first token - arrival             TPOT  (finish - first token) / (output tokens - 1)
    E2E   finish - arrival                  ITL   gap between one streamed chunk and the next
    TPT   (finish - arrival) / output tokens

Failed requests have no latency; they are counted, and their errors listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from loraplex.bench.distribution import Distribution
from loraplex.bench.records import RequestRecord
from loraplex.core.words import plural

_MAX_ERRORS_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """The samples behind a report, in milliseconds; used for plots."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    e2e_ms: list[float]
    tpt_ms: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The figures of one run."""

    num_requests: int
    num_failed: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    tpt_ms: Distribution | None = None
    errors: dict[str, int] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {key: _rounded(value) for key, value in asdict(self).items()}


def latencies(records: Sequence[RequestRecord]) -> Latencies:
    """Return the latencies of the requests that succeeded."""
    samples = Latencies(ttft_ms=[], tpot_ms=[], itl_ms=[], e2e_ms=[], tpt_ms=[])
    for record in records:
        if not record.ok:
            continue
        first_s = record.first_token_s
        assert first_s is not None, "the client fails a request that streamed no token"
        samples.ttft_ms.append(1e3 * (first_s - record.arrival_s))
        samples.e2e_ms.append(1e3 * (record.finish_s - record.arrival_s))
        samples.tpt_ms.append(1e3 * (record.finish_s - record.arrival_s) / record.output_tokens)
        if record.output_tokens > 1:
            samples.tpot_ms.append(1e3 * (record.finish_s - first_s) / (record.output_tokens - 1))
        samples.itl_ms.extend(1e3 * (later - sooner) for sooner, later in pairwise(record.token_times_s))
    return samples


def summarize(records: Sequence[RequestRecord]) -> Report:
    """Return the report of one run. Throughput counts successful requests over the run's whole duration."""
    good = [record for record in records if record.ok]
    samples = latencies(records)
    duration_s = (
        max(record.finish_s for record in records) - min(record.arrival_s for record in records)
        if records
        else 0.0
    )
    prompt_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    return Report(
        num_requests=len(records),
        num_failed=len(records) - len(good),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=_rate(output_tokens, duration_s),
        total_tokens_per_s=_rate(prompt_tokens + output_tokens, duration_s),
        requests_per_s=_rate(len(good), duration_s),
        ttft_ms=Distribution.of(samples.ttft_ms),
        tpot_ms=Distribution.of(samples.tpot_ms),
        itl_ms=Distribution.of(samples.itl_ms),
        e2e_ms=Distribution.of(samples.e2e_ms),
        tpt_ms=Distribution.of(samples.tpt_ms),
        errors=dict(Counter(record.error for record in records if record.error is not None).most_common()),
    )


def render(report: Report, *, title: str) -> RenderableType:
    """Return the report for a terminal."""
    latency = Table(title=title, title_justify="left")
    for heading in ("", "mean", "p50", "p95", "p99"):
        latency.add_column(heading, justify="right" if heading else "left")
    rows = {
        "TTFT ms": report.ttft_ms,
        "TPOT ms": report.tpot_ms,
        "ITL ms": report.itl_ms,
        "E2E ms": report.e2e_ms,
        "TPT ms": report.tpt_ms,
    }
    for name, distribution in rows.items():
        cells = (
            ["-"] * 4
            if distribution is None
            else [f"{ms:,.2f}" if ms < 100 else f"{ms:,.0f}" for ms in asdict(distribution).values()]
        )
        latency.add_row(name, *cells)

    throughput = Text(
        f"{report.output_tokens_per_s:,.1f} output tok/s, {report.total_tokens_per_s:,.1f} total tok/s, "
        f"{report.requests_per_s:,.2f} requests/s over {report.duration_s:,.1f} s\n"
        f"{report.num_requests - report.num_failed} of {report.num_requests} requests succeeded"
    )
    return Group(latency, throughput, *_error_lines(report))


def _error_lines(report: Report) -> list[Text]:
    shown = list(report.errors.items())[:_MAX_ERRORS_SHOWN]
    lines = [Text(f"failed {count}x: {error}", style="red") for error, count in shown]
    if hidden := len(report.errors) - len(shown):
        lines.append(
            Text(
                f"... and {hidden} other {plural('error', hidden)} (all of them are in the JSON)", style="red"
            )
        )
    return lines


def _rate(amount: int, duration_s: float) -> float:
    return amount / duration_s if duration_s > 0 else 0.0


def _rounded(value: Any) -> Any:
    """Round floats: microseconds are below the noise, and long fractions make results hard to read."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
