"""The tables of fleets, from `results/fleet.json`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from benchmarks.markdown import Result, table
from loraplex.core.words import plural
from loraplex.twin.fleet_figures import half_interval

KERNELS: Final = ("padded", "rank-proportional")
PAPERS: Final = ("rank-aware", "pending-time+burst-tolerance+migrate", "routing-table+loraserve")
"""The policies that the papers would choose."""
AFTER_FIRST: Final = ", after the first token"
"""Suffix of a fleet's name whose SLO is on the time per token after the first."""
ORACLE, AUTO, AFFINITY = "oracle", "auto", "affinity"
NOT_YET: Final = "Not measured yet.\n"


class Mean(NamedTuple):
    """The mean over seeds. `half`: half the width of its 95% confidence interval; None for one seed."""

    mean: float
    half: float | None

    def text(self, form: str, factor: float = 1.0) -> str:
        half = "" if self.half is None else f" ± {self.half * factor:{form}}"
        return f"{self.mean * factor:{form}}{half}"


def mean_of(values: Iterable[float | None]) -> Mean | None:
    known = [value for value in values if value is not None]
    return Mean(sum(known) / len(known), half_interval(known)) if known else None


# ---- decisions


def decisions_table(result: Result) -> str:
    found = result["decisions"]["results"]
    sizes = list(found["routing_us"])
    wanted_us = {"60": "100", "1000": "2,000"}
    lines = [
        (f"routing, `{name}`, us", *(f"{found['routing_us'][size][name]['median']:,.0f}" for size in sizes))
        for name in found["routing_us"][sizes[0]]
    ]
    lines.append(("wanted, us", *(wanted_us.get(size, "") for size in sizes)))
    return table(("one decision, median", *(f"{int(size):,} replicas" for size in sizes)), lines)


def plans_table(result: Result) -> str:
    found = result["decisions"]["results"]
    lines = [
        (f"placing 40,000 adapters on 60 replicas, `{name}`", f"{each['median']:.2f} s", "1 s")
        for name, each in found["placement_s"].items()
    ]
    migration = found["migration_ms"]
    lines.append(("migration of 8 replicas and 500 requests", f"{migration['median']:.0f} ms", "100 ms"))
    return table(("", "median", "wanted"), lines)


def decisions_note(result: Result) -> str:
    found = result["decisions"]
    return (
        f"Measured {found['date'][:10]} on one core of {found['machine']['cpu']}, shared with others, commit "
        f"{found['git_commit'] or 'unknown'}. Costs are those of the profile of an H200.\n"
    )


# ---- simulated runs


def runs_of(result: Result, section: str) -> list[Mapping[str, Any]]:
    """Return the runs of a section; empty if it was not made."""
    return list(result.get(section, {}).get("runs", {}).values())


def simulated_note(result: Result, section: str) -> str:
    found = result.get(section)
    if found is None:
        return ""
    data = "published traces" if found["parameters"]["published_data"] else "synthetic traces"
    commit = found["git_commit"] or "unknown"
    runs = runs_of(result, section)
    num_seeds = len({run["seed"] for run in runs})
    seeds = f", {num_seeds} {plural('seed', num_seeds)} at the most" if num_seeds else ""
    is_searched = any("capacity_rps" in run for run in runs)
    tolerance = found["parameters"]["tolerance"]
    searched = f", rates found to within {tolerance:.0%}" if is_searched else ""
    return f"Computed {found['date'][:10]}, commit {commit}, {data}{seeds}{searched}.\n"


def capacities(runs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Mean]]:
    """Return requests/s by fleet and policy."""
    return figures(runs, "capacity_rps")


def figures(runs: Iterable[Mapping[str, Any]], name: str) -> dict[str, dict[str, Mean]]:
    """Return one figure by fleet and policy, from the runs that have it."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        if run.get(name) is not None:
            values.setdefault(run["fleet"], {}).setdefault(run["policy"], []).append(run[name])
    return {
        fleet: {policy: mean for policy, each in policies.items() if (mean := mean_of(each)) is not None}
        for fleet, policies in values.items()
    }


def sixty_table(result: Result) -> str:
    runs = runs_of(result, "sixty")
    attained, tpt = figures(runs, "attainment"), figures(runs, "tpt_mean_s")
    paced, loads = figures(runs, "attainment_after_first_token"), figures(runs, "adapter_loads")
    rates = {run["fleet"]: run["rate_rps"] for run in runs if "rate_rps" in run}
    lines = []
    for name in (f"{kernels}{about}" for about in ("", AFTER_FIRST) for kernels in KERNELS):
        ours = tpt.get(name, {}).get("rank-aware")
        lines += [
            (
                f"{name}, {rates[name]:,.0f} requests/s",
                f"`{policy}`",
                each.text(".1f", 100),
                paced[name][policy].text(".1f", 100),
                tpt[name][policy].text(".2f", 1e3),
                "-" if ours is None else f"{100 * (ours.mean / tpt[name][policy].mean - 1):+.1f}%",
                loads[name][policy].text(",.0f"),
            )
            for policy, each in attained.get(name, {}).items()
        ]
    headings = (
        "kernels", "policy", "within the SLO, %", "after the first token, %", "mean per token, ms",
        "`rank-aware` against it", "loads",
    )  # fmt: skip
    return table(headings, lines) if lines else NOT_YET


def loraserve_table(result: Result) -> str:
    """Return a table of each policy's capacity relative to S-LoRA's random placement, as geometric means over
    traces."""
    found = capacities(runs_of(result, "loraserve"))
    sizes = sorted({name.split(", ")[0] for name in found}, key=lambda size: int(size.split()[0]))
    policies = list(dict.fromkeys(policy for each in found.values() for policy in each))
    if not policies:
        return NOT_YET
    first = policies[0]
    lines = []
    for policy in policies:
        cells = []
        for size in sizes:
            both = [each for name, each in found.items() if name.startswith(size) and policy in each]
            ratio = geometric_mean([each[policy].mean / each[first].mean for each in both if first in each])
            cells.append("-" if ratio is None else f"{ratio:.2f}x ({len(both)} traces)")
        lines.append((f"`{policy}`", *cells))
    return table(("capacity, P95 TTFT within 10 s", *sizes), lines)


def loraserve_storage_table(result: Result) -> str:
    """Return a table of the fullest host's share of all adapters, as means over traces."""
    found = figures(runs_of(result, "loraserve"), "held_over_everywhere")
    sizes = sorted({name.split(", ")[0] for name in found}, key=lambda size: int(size.split()[0]))
    policies = list(dict.fromkeys(policy for each in found.values() for policy in each))
    if not policies:
        return NOT_YET
    lines = []
    for policy in policies:
        cells = []
        for size in sizes:
            held = mean_of(
                each[policy].mean
                for name, each in found.items()
                if name.startswith(f"{size},") and policy in each
            )
            cells.append("-" if held is None else f"{held.mean:.2f}, {1 / held.mean:.1f}x less")
        lines.append((f"`{policy}`", *cells))
    return table(("fullest host, over a copy of everything", *sizes), lines)


def bounds_table(result: Result) -> str:
    if "bounds" not in result:
        return NOT_YET
    found = result["bounds"]["results"]
    batches = list(next(iter(found.values())))
    lines = [
        (name, _rank_rates(each[batches[0]]), *(f"{each[batch]['gain_at_most']:.2f}x" for batch in batches))
        for name, each in found.items()
    ]
    means = (geometric_mean([each[batch]["gain_at_most"] for each in found.values()]) for batch in batches)
    lines.append(("geometric mean", "", *(f"{mean:.2f}x" for mean in means)))
    gains = (f"gain at the most, batches of {batch}" for batch in batches)
    return table(("workload", f"tokens/s of a batch of {batches[0]}, by rank", *gains), lines)


def _rank_rates(each: Mapping[str, Any]) -> str:
    return ", ".join(f"{rank}: {rate:,}" for rank, rate in each["tokens_per_s_by_rank"].items())


def dlora_table(result: Result) -> str:
    found = capacities(runs_of(result, "dlora"))
    lines = []
    for name, each in found.items():
        first = next(iter(each.values()))
        lines += [
            (name, f"`{policy}`", mean.text(".1f"), f"{mean.mean / first.mean:.2f}x")
            for policy, mean in each.items()
        ]
    headings = ("popularity", "policy", "requests/s", "over round robin")
    return table(headings, lines) if lines else NOT_YET


def auto_table(result: Result) -> str:
    """Return a table of the capacity of `auto`, beside the best of all others and the oracle."""
    lines = []
    for fleet, each in _with_auto(result).items():
        best = max(
            (policy for policy in each if policy not in (AUTO, ORACLE)), key=lambda name: each[name].mean
        )
        lines.append(
            (
                fleet,
                each[AUTO].text(".1f"),
                f"{each[best].text('.1f')}, `{best}`",
                f"{each[AUTO].mean / each[best].mean:.3f}",
                f"{each[AUTO].mean / each[ORACLE].mean:.3f}" if ORACLE in each else "-",
                f"{each[AUTO].mean / max(each[policy].mean for policy in PAPERS if policy in each):.3f}",
            )
        )
    if not lines:
        return NOT_YET
    headings = (
        "workload, kernels", "`auto`, requests/s", "best of the others", "over the best", "over the oracle",
        "over the papers' best",
    )  # fmt: skip
    wanted = ("wanted, at least", "", "", "0.980", "0.950", "1.150, geometric mean, padded")
    return table(headings, [*lines, *_auto_means(result), wanted])


def policies_table(result: Result) -> str:
    """Return a table of every policy's capacity on the workloads of `auto`."""
    found = capacities(runs_of(result, "auto"))
    policies = list(dict.fromkeys(policy for each in found.values() for policy in each))
    if not policies:
        return NOT_YET
    lines = [
        (fleet, *(each[policy].text(".1f") if policy in each else "-" for policy in policies))
        for fleet, each in found.items()
    ]
    return table(("workload, kernels", *(f"`{policy}`" for policy in policies)), lines)


def _with_auto(result: Result) -> dict[str, dict[str, Mean]]:
    found = capacities(runs_of(result, "auto"))
    return {
        fleet: each
        for fleet, each in found.items()
        if AUTO in each and any(policy in each for policy in PAPERS)
    }


def _auto_means(result: Result) -> list[Sequence[str]]:
    lines: list[Sequence[str]] = []
    for kernels in KERNELS:
        ratios = [
            each[AUTO].mean / max(each[policy].mean for policy in PAPERS if policy in each)
            for fleet, each in _with_auto(result).items()
            if fleet.endswith(kernels)
        ]
        mean = geometric_mean(ratios)
        if mean is not None:
            lines.append((f"geometric mean, {kernels}", "", "", "", "", f"{mean:.3f}"))
    return lines


def auto_figures_table(result: Result) -> str:
    """Return a table of `auto` and `affinity` at the rate that `affinity` sustains."""
    runs = [run for run in runs_of(result, "auto") if "rate_rps" in run]
    names = ("adapter_loads", "busiest_over_mean", "worst_adapter_over_fleet", "held_over_everywhere")
    loads, busiest, worst, held = (figures(runs, name) for name in names)
    lines = [
        (
            fleet,
            f"{each[AUTO].mean / each[AFFINITY].mean:.2f}",
            busiest[fleet][AUTO].text(".2f"),
            worst[fleet][AUTO].text(".2f"),
            held[fleet][AUTO].text(".2f"),
        )
        for fleet, each in loads.items()
        if AUTO in each and AFFINITY in each
    ]
    if not lines:
        return NOT_YET
    lines.append(("wanted, at most", "0.50", "1.25", "3.00", "0.25"))
    headings = (
        "workload, kernels", "loads over `affinity`'s", "busiest over mean replica",
        "worst adapter's P99 TTFT over the fleet's", "storage over everywhere",
    )  # fmt: skip
    return table(headings, lines)


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None
