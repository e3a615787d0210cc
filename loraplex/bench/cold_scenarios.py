"""Compares cold start policies: the same requests with each policy, on one engine.

Scenarios: on an idle engine, the first token of a single request with its adapter on disk, in host memory or
on the device; and a workload replayed in real time, every request on an adapter of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.alternating import quiet_collector
from loraplex.bench.distribution import Distribution
from loraplex.bench.engine_scenarios import first_token_ms, replay, run_dry
from loraplex.bench.random_engine import register
from loraplex.bench.records import RequestRecord
from loraplex.bench.report import Latencies, latencies
from loraplex.core.cold_start import ColdStart
from loraplex.engine.core import Engine
from loraplex.workload.jsonl import WorkloadRequest

LONG_GAP: Final = 1.5
"""Factor over the median gap between tokens with all adapters cached; a longer gap is an interruption."""
METRICS: Final = ("ttft_ms", "tpt_ms", "e2e_ms")

MakeSpecs = Callable[[str, int], Sequence[AdapterSpec]]
"""Makes new adapters, given a prefix of their names and their number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFigures:
    """A policy's latencies, their overheads as shares of those of `cached`, and interruptions of requests."""

    latencies: Latencies
    distributions: dict[str, Distribution]
    overheads: dict[str, dict[str, float]]
    interruptions_per_request: float
    itl_p99_overhead: float

    def as_json(self) -> dict[str, Any]:
        return {
            **{
                name: {"mean": round(found.mean, 3), "p95": round(found.p95, 3)}
                for name, found in self.distributions.items()
            },
            "over_cached": {
                name: {key: round(value, 4) for key, value in figures.items()}
                for name, figures in self.overheads.items()
            },
            "interruptions_per_request": round(self.interruptions_per_request, 3),
            "itl_p99_over_cached": round(self.itl_p99_overhead, 4),
        }


def compare_policies(
    engine: Engine,
    policies: Sequence[ColdStart],
    requests: Sequence[WorkloadRequest],
    make_specs: MakeSpecs,
    vocab_size: int,
) -> dict[ColdStart, PolicyFigures]:
    """Replay the requests with each policy. `cached` is always among them, because the others are compared
    with it."""
    spread = [replace(request, adapter=index) for index, request in enumerate(requests)]
    records: dict[ColdStart, list[RequestRecord]] = {}
    for policy in dict.fromkeys((ColdStart.CACHED, *policies)):
        engine.choose_cold_start(policy)
        versions = register(engine, make_specs(str(policy), len(requests)))
        records[policy] = replay(engine, spread, versions, vocab_size)
        forget(engine, versions)
    return figures_of(records)


def figures_of(records: Mapping[ColdStart, Sequence[RequestRecord]]) -> dict[ColdStart, PolicyFigures]:
    samples = {policy: latencies(found) for policy, found in records.items()}
    cached = _distributions(samples[ColdStart.CACHED])
    long_ms = LONG_GAP * cached["itl_ms"].p50
    found = {}
    for policy, sample in samples.items():
        own = _distributions(sample)
        found[policy] = PolicyFigures(
            latencies=sample,
            distributions=own,
            overheads={
                name: {
                    "mean": own[name].mean / cached[name].mean - 1,
                    "p95": own[name].p95 / cached[name].p95 - 1,
                }
                for name in METRICS
            },
            interruptions_per_request=sum(gap > long_ms for gap in sample.itl_ms) / len(sample.ttft_ms),
            itl_p99_overhead=own["itl_ms"].p99 / cached["itl_ms"].p99 - 1,
        )
    return found


def measure_idle(
    engine: Engine,
    policies: Sequence[ColdStart],
    make_specs: MakeSpecs,
    *,
    starts: Sequence[str],
    num_adapters: int,
    prompt_tokens: int,
    vocab_size: int,
) -> dict[ColdStart, dict[str, Distribution]]:
    """Return the milliseconds to the first token on an idle engine, by policy and by where the adapter was:
    in each of `starts` ("disk", "host"), and, for a second request, "ready".
    """
    found: dict[ColdStart, dict[str, Distribution]] = {}
    for policy in policies:
        engine.choose_cold_start(policy)
        times: dict[str, list[float]] = {}
        for start in starts:
            # One more than is counted: the first may compile and capture.
            versions = register(
                engine, make_specs(f"{policy}-{start}", num_adapters + 1), staged=start == "host"
            )
            where = "ready" if policy is ColdStart.CACHED else start
            with quiet_collector():
                for number, version in enumerate(versions):
                    first = first_token_ms(engine, version, prompt_tokens, vocab_size, seed=2 * number)
                    second = first_token_ms(engine, version, prompt_tokens, vocab_size, seed=2 * number + 1)
                    if number > 0:
                        times.setdefault(where, []).append(first)
                        times.setdefault("ready", []).append(second)
            forget(engine, versions)
        found[policy] = {where: _distribution(values) for where, values in times.items()}
    return found


def burst(
    engine: Engine, policies: Sequence[ColdStart], make_specs: MakeSpecs, *, size: int, prompt_tokens: int,
    vocab_size: int,
) -> dict[ColdStart, Distribution]:  # fmt: skip
    """Return the milliseconds to the first token of requests on as many adapters, all added at once."""
    found = {}
    requests = [
        WorkloadRequest(arrival_s=0.0, prompt_tokens=prompt_tokens, output_tokens=2, adapter=index)
        for index in range(size)
    ]
    for policy in dict.fromkeys((ColdStart.CACHED, *policies)):
        engine.choose_cold_start(policy)
        versions = register(engine, make_specs(f"burst-{policy}", size))
        found[policy] = _distribution(latencies(replay(engine, requests, versions, vocab_size)).ttft_ms)
        forget(engine, versions)
    return found


def forget(engine: Engine, versions: Sequence[str]) -> None:
    """Remove adapters from every tier."""
    for version in versions:
        engine.remove_adapter(version)
    run_dry(engine)
    engine.take_removed_adapters()
    assert {adapter.version for adapter in engine.stats().adapters}.isdisjoint(versions)


def _distributions(sample: Latencies) -> dict[str, Distribution]:
    return {name: _distribution(getattr(sample, name)) for name in (*METRICS, "itl_ms")}


def _distribution(values: Sequence[float]) -> Distribution:
    found = Distribution.of(values)
    assert found is not None, "nothing was measured"
    return found
