"""Measure in the twin how tenants share an engine, and what it refuses under overload.

    python -m benchmarks.fairness                 # ten minutes of one core; no GPU

Ten tenants with equal shares ask a simulated engine on an H200 (the profile of the package) for as much as it
serves well. Then one of them asks for ten times its share. The others' first tokens are compared with those
of the run in which it keeps to its share, and of one without it: first come, first served, by fair shares,
and with --max-borrowing. `fleets` repeats that with several engines behind one address, each of which has its
own counters. `overload` compares goodput at twice the peak's rate with the peak, `paces` what objectives for
the time per token change there. `recorded` replays the trace of the VTC paper's artifact, faster, since this
engine is, beside the recorded runs of its schedulers; it is left out if their data is not there. `--tiny`
tests the script, and writes nothing without --out.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.sources import fingerprints
from loraplex.bench.environment import environment
from loraplex.core.tenants import TenantPolicy
from loraplex.core.whole_file import write_whole
from loraplex.fleet.policy import AUTO, Policy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.named_profiles import find_profile
from loraplex.twin.fleet_run import FleetOptions, FleetRuns
from loraplex.twin.outcome import RequestOutcome
from loraplex.twin.replay import ReplayOptions, replay
from loraplex.twin.slo import Slo
from loraplex.twin.tenant_figures import fair_parts, jain, tenant_figures
from loraplex.workload.jsonl import WorkloadRequest

FILE: Final = "fairness.json"
RESULTS: Final = Path(__file__).parent / "results" / FILE
DATA: Final = Path("../shared/data")
TRACE: Final = "traces/vtc_lmsys_arena_27clients.csv.gz"
RECORDED: Final = "measurements/vtc_slora_perrequest_realtrace.csv.gz"
PROFILE: Final = "h200-llama-3-8b"
FLEETS: Final = (2, 4)
"""Numbers of replicas at which neighbours are compared as well."""
NUM_TENANTS: Final = 10
ADAPTERS_EACH: Final = 3
SHARE_RPS: Final = 5.5
"""Requests per second and replica of a tenant that keeps to its share; all ten ask for 85% of the peak."""
NOISE: Final = 10.0
SLO_TTFT_S: Final = 2.0
SLO_TPT_S: Final = 0.02
WARM_S: Final = 5.0
PEAK_RATES: Final = (55.0, 65.0, 75.0)
RECORDED_S: Final = 600.0
RECORDED_KV: Final = 10_000
NUM_HEAVY: Final = 3
"""Clients of the trace that count as heavy: those that ask for the most."""


def profile() -> CostModel:
    found = find_profile(Path(PROFILE))
    assert isinstance(found, CostModel)
    return found


def policies(slo_s: float | None) -> tuple[TenantPolicy, ...]:
    return tuple(TenantPolicy(name=f"t{number}", slo_ttft=slo_s) for number in range(NUM_TENANTS))


def traffic(rates: Sequence[float], duration_s: float) -> list[WorkloadRequest]:
    """Return Poisson arrivals of each tenant. Its requests are the same whatever the others ask for."""
    made = []
    for tenant, rate in enumerate(rates):
        rng, at_s = np.random.default_rng([7, tenant]), 0.0
        while rate > 0 and (at_s := at_s + rng.exponential(1 / rate)) < duration_s:
            made.append(
                WorkloadRequest(
                    arrival_s=at_s,
                    prompt_tokens=int(np.clip(rng.lognormal(np.log(200), 0.8), 8, 2000)),
                    output_tokens=int(np.clip(rng.lognormal(np.log(120), 0.6), 8, 600)),
                    adapter=tenant * ADAPTERS_EACH + int(rng.integers(ADAPTERS_EACH)),
                    tenant=f"t{tenant}",
                )
            )
    return sorted(made, key=lambda each: each.arrival_s)


def served(
    model: CostModel,
    workload: Sequence[WorkloadRequest],
    duration_s: float,
    *,
    num_replicas: int = 1,
    **options: Any,
) -> list[RequestOutcome]:
    """Return the outcome of each request on a server of one engine, or on a fleet with its default policy."""
    chosen = ReplayOptions(
        num_adapters=NUM_TENANTS * ADAPTERS_EACH, ranks=(16,), until_s=duration_s, **options
    )
    runs = FleetRuns(model, workload, FleetOptions(num_replicas=num_replicas, replay=chosen))
    return list(runs.run(Policy.of(AUTO)).all.requests)


def figures(requests: Sequence[RequestOutcome], tenants: Sequence[str], duration_s: float) -> dict[str, Any]:
    """Return the figures of a run. `tenants`: whose requests they are, one by one. Requests that still wait
    at the end count as if they were served then."""
    named = [
        replace(each, request=replace(each.request, tenant=tenant))
        for each, tenant in zip(requests, tenants, strict=True)
        if each.request.arrival_s >= WARM_S
    ]
    counted_s = duration_s - WARM_S
    by_tenant = tenant_figures(named, (), duration_s=counted_s, slo=Slo(ttft_s=SLO_TTFT_S))
    others = [each for each in named if each.request.tenant != "t0" and not each.refused]
    admitted = [
        each for each in named if each.request.arrival_s < duration_s - SLO_TTFT_S and not each.refused
    ]
    waits_s = [duration_s - each.request.arrival_s if each.ttft_s is None else each.ttft_s for each in others]
    return {
        "requests": len(named),
        "others_ttft_p50_s": float(np.percentile(waits_s, 50)),
        "others_ttft_p95_s": float(np.percentile(waits_s, 95)),
        "others_refused": sum(row.num_refused for name, row in by_tenant.items() if name != "t0"),
        "noisy_refused": by_tenant["t0"].num_refused if "t0" in by_tenant else 0,
        "noisy_goodput_per_s": by_tenant["t0"].goodput_rps if "t0" in by_tenant else 0.0,
        "goodput_per_s": sum(each.goodput_rps for each in by_tenant.values()),
        "admitted_in_time": sum(_in_time(each) for each in admitted) / len(admitted),
        "jain": evenness(requests, tenants),
    }


def _in_time(outcome: RequestOutcome) -> bool:
    return outcome.ttft_s is not None and outcome.ttft_s <= SLO_TTFT_S


def evenness(requests: Sequence[RequestOutcome], tenants: Sequence[str]) -> float:
    """Return Jain's index of what tenants got of their fair parts, after the warm-up: of all answers that
    ended then, whenever they were asked for."""
    demand: dict[str, float] = {}
    service: dict[str, float] = {}
    for each, tenant in zip(requests, tenants, strict=True):
        cost = each.request.prompt_tokens + 2 * each.request.output_tokens
        demand[tenant] = demand.get(tenant, 0.0) + cost * (each.request.arrival_s >= WARM_S)
        ended = each.finish_s is not None and each.finish_s >= WARM_S
        service[tenant] = service.get(tenant, 0.0) + cost * ended
    names = sorted(demand)
    parts = fair_parts([demand[each] for each in names], [1.0] * len(names), sum(service.values()))
    return jain([service[each] / part for each, part in zip(names, parts, strict=True) if part > 0])


def neighbours(model: CostModel, duration_s: float, num_replicas: int) -> dict[str, Any]:
    """Let one tenant ask for ten times its share of so many replicas."""
    share_rps, rights = SHARE_RPS * num_replicas, policies(SLO_TTFT_S)
    found: dict[str, Any] = {}
    for name, rate, options in (
        ("without it", 0.0, {"tenants": rights}),
        ("at its share", share_rps, {"tenants": rights}),
        ("first come, first served", NOISE * share_rps, {}),
        ("fair shares", NOISE * share_rps, {"tenants": rights}),
        ("fair shares, borrowing 10%", NOISE * share_rps, {"tenants": rights, "max_borrowing": 0.1}),
        ("fair shares, borrowing 0%", NOISE * share_rps, {"tenants": rights, "max_borrowing": 0.0}),
    ):
        workload = traffic([rate] + [share_rps] * (NUM_TENANTS - 1), duration_s)
        sent = workload if "tenants" in options else [replace(each, tenant="") for each in workload]
        requests = served(model, sent, duration_s, num_replicas=num_replicas, **options)
        found[name] = figures(requests, [each.tenant for each in workload], duration_s)
        print(f"{num_replicas} replicas, {name}: {json.dumps(found[name])}", flush=True)
    for row in found.values():
        for name in ("at its share", "without it"):
            row[f"over {name}"] = row["others_ttft_p95_s"] / found[name]["others_ttft_p95_s"]
    return found


def overload(model: CostModel, duration_s: float) -> dict[str, Any]:
    """Compare goodput at twice the peak's rate with the peak, with and without objectives."""

    def run(rate: float, *, bounded: bool) -> dict[str, Any]:
        workload = traffic([rate / NUM_TENANTS] * NUM_TENANTS, duration_s)
        options: dict[str, Any] = {"tenants": policies(SLO_TTFT_S)} if bounded else {}
        requests = served(model, workload, duration_s, **options)
        return figures(requests, [each.tenant for each in workload], duration_s)

    tried = {rate: run(rate, bounded=False)["goodput_per_s"] for rate in PEAK_RATES}
    rate = max(tried, key=lambda each: tried[each])
    twice = run(2 * rate, bounded=True)
    found: dict[str, Any] = {
        "tried": tried,
        "rate": rate,
        "peak_per_s": max(tried[rate], run(rate, bounded=True)["goodput_per_s"]),
        "twice_per_s": twice["goodput_per_s"],
        "twice_admitted_in_time": twice["admitted_in_time"],
        "twice_unbounded_per_s": run(2 * rate, bounded=False)["goodput_per_s"],
    }
    found["ratio"] = found["twice_per_s"] / found["peak_per_s"]
    print(json.dumps(found), flush=True)
    return found


def paces(model: CostModel, rate: float, duration_s: float) -> dict[str, Any]:
    """Serve twice the peak's rate with objectives for the time per token, and without."""
    workload = traffic([2 * rate / NUM_TENANTS] * NUM_TENANTS, duration_s)
    slo, found = Slo(ttft_s=SLO_TTFT_S, tpot_s=SLO_TPT_S), {}
    for name, ttft_s, tpt_s in (
        ("none", None, None),
        ("TTFT 2 s", SLO_TTFT_S, None),
        ("TTFT 2 s, 20 ms per token", SLO_TTFT_S, SLO_TPT_S),
    ):
        rights = tuple(
            TenantPolicy(name=f"t{number}", slo_ttft=ttft_s, slo_tpt=tpt_s) for number in range(NUM_TENANTS)
        )
        requests = [
            each
            for each in served(model, workload, duration_s, tenants=rights)
            if each.request.arrival_s >= WARM_S
        ]
        seen_s = [each.tpot_s for each in requests if each.tpot_s is not None]
        figures_of = tenant_figures(requests, (), duration_s=duration_s - WARM_S, slo=slo)
        found[name] = {
            "requests": len(requests),
            "refused": sum(each.refused for each in requests),
            "tpt_p50_s": float(np.percentile(seen_s, 50)),
            "in_time": sum(each <= SLO_TPT_S for each in seen_s) / len(seen_s),
            "goodput_per_s": sum(each.goodput_rps for each in figures_of.values()),
        }
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


# ---- the recorded schedulers of the VTC paper


def rows_of(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def recorded(model: CostModel, data: Path) -> dict[str, Any]:
    """Return how evenly the clients of the trace were served: by each recorded scheduler, and by ours."""
    rows = rows_of(data / RECORDED)
    found: dict[str, Any] = {}
    for scheduler in sorted({row["policy"] for row in rows}):
        own = [row for row in rows if row["policy"] == scheduler]
        found[scheduler] = spread(
            [int(row["adapter"]) for row in own],
            [float(row["arrival_s"]) for row in own],
            [int(row["prompt_tokens"]) + 2 * int(row["output_tokens"]) for row in own],
            [None if float(row["ttft_s"]) < 0 else float(row["ttft_s"]) for row in own],
            [None if float(row["latency_s"]) < 0 else float(row["latency_s"]) for row in own],
            RECORDED_S,
        )
    trace = rows_of(data / TRACE)
    speed = speed_like(model, trace, found["FCFS"]["ttft_mean_s"])
    for name, is_fair in (("ours, fcfs", False), ("ours, fair shares", True)):
        requests = replayed(model, trace, speed, is_fair=is_fair)
        found[name] = {"speed": speed} | spread(
            [each.request.adapter for each in requests],
            [each.request.arrival_s for each in requests],
            [each.request.prompt_tokens + 2 * each.request.output_tokens for each in requests],
            [each.ttft_s for each in requests],
            [None if (end := each.finish_s) is None else end - each.request.arrival_s for each in requests],
            RECORDED_S / speed,
        )
    for name, row in found.items():
        print(f"{name}: {json.dumps(row)}", flush=True)
    return found


def speed_like(model: CostModel, trace: Sequence[dict[str, str]], wanted_s: float) -> float:
    """Return how much faster the trace has to be for requests to wait as large a part of it, first come,
    first served, as in a recorded run."""
    low, high = 1.0, 64.0
    for _ in range(7):
        middle = (low * high) ** 0.5
        waits_s = [each.ttft_s or 0.0 for each in replayed(model, trace, middle, is_fair=False)]
        low, high = (low, middle) if middle * float(np.mean(waits_s)) > wanted_s else (middle, high)
    return round(low, 3)


def replayed(
    model: CostModel, trace: Sequence[dict[str, str]], speed: float, *, is_fair: bool
) -> list[RequestOutcome]:
    """Replay the trace on an engine with as little KV memory as the recorded one."""
    workload = [
        WorkloadRequest(
            arrival_s=float(row["arrival_s"]) / speed,
            prompt_tokens=int(row["prompt_tokens"]),
            output_tokens=int(row["output_tokens"]),
            adapter=int(row["adapter"]),
            tenant=row["adapter"] if is_fair else "",
        )
        for row in trace
    ]
    options = ReplayOptions(num_adapters=27, ranks=(8,), kv_tokens=RECORDED_KV, staged=True)
    return list(replay(model, workload, options).requests)


def spread(
    clients: Sequence[int],
    arrivals_s: Sequence[float],
    costs: Sequence[int],
    ttfts_s: Sequence[float | None],
    latencies_s: Sequence[float | None],
    duration_s: float,
) -> dict[str, Any]:
    """Return figures of a run with one list entry for each request. Service counts if it was complete by the
    end of the trace. Times are shares of the trace's length, so that engines of other speeds compare."""
    ids = sorted(set(clients))
    demand, service = dict.fromkeys(ids, 0.0), dict.fromkeys(ids, 0.0)
    for client, arrival_s, cost, latency_s in zip(clients, arrivals_s, costs, latencies_s, strict=True):
        demand[client] += cost
        if latency_s is not None and arrival_s + latency_s <= duration_s:
            service[client] += cost
    heavy = set(sorted(ids, key=lambda each: -demand[each])[:NUM_HEAVY])
    parts = fair_parts([demand[each] for each in ids], [1.0] * len(ids), sum(service.values()))
    known = [
        (client in heavy, ttft_s)
        for client, ttft_s in zip(clients, ttfts_s, strict=True)
        if ttft_s is not None
    ]
    light = [ttft_s / duration_s for is_heavy, ttft_s in known if not is_heavy]
    return {
        "jain": jain([service[each] / part for each, part in zip(ids, parts, strict=True) if part > 0]),
        "ttft_mean_s": float(np.mean([ttft_s for _, ttft_s in known])),
        "light_ttft_p95_share": float(np.percentile(light, 95)),
        "heavy_ttft_p95_share": float(
            np.percentile([s / duration_s for is_heavy, s in known if is_heavy], 95)
        ),
        "not_served": sum(each is None for each in ttfts_s),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the recorded runs")
    parser.add_argument("--tiny", action="store_true", help="short runs: tries the script")
    parser.add_argument("--out", type=Path, help=f"default: results/{FILE}, nothing if --tiny")
    args = parser.parse_args(argv)
    model, duration_s = profile(), 8.0 if args.tiny else 40.0
    beyond = overload(model, duration_s)
    results = {
        "neighbours": neighbours(model, duration_s, 1),
        "fleets": {number: neighbours(model, duration_s, number) for number in FLEETS},
        "overload": beyond,
        "paces": paces(model, beyond["rate"], duration_s),
    }
    if (args.data / RECORDED).exists() and not args.tiny:
        results["recorded"] = recorded(model, args.data)
    out = args.out or (None if args.tiny else RESULTS)
    if out is not None:
        parameters = {"profile": PROFILE, "duration_s": duration_s, "slo_ttft_s": SLO_TTFT_S}
        document = environment(("loraplex", "numpy")) | {
            "sources": fingerprints(FILE),
            "parameters": parameters,
            "results": results,
        }
        write_whole(out, json.dumps(document, indent=1) + "\n")
        print(f"wrote {out}")


if __name__ == "__main__":
    main()
