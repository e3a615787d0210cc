"""The tables of cold starts, from results/gpu_cold.json and assist.json; `benchmarks.make_tables` inserts
them into the docs.

Targets stand beside the measurements, whether they were reached or not.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks.markdown import Result, TableError, table

HOST_MS, DISK_MS = 0.5, 12.0
"""Most milliseconds over the TTFT of an adapter that is on the device."""
OVER_BUS: Final = 1.25
OVER_CACHED: Final = 0.02
ITL_OVER_CACHED: Final = 0.05
BURST_OVER_CACHED: Final = 1.5
ROUND_TRIP_US: Final = 60.0
WORKERS_SPEEDUP: Final = 1.7
AIM_TOKENS, RANK = 256, 64
"""The product that CPU workers are judged by; the table has others of this rank."""
METRICS: Final = ("ttft_ms", "tpt_ms", "e2e_ms")


def section(result: Result, name: str) -> Any:
    """Return the results of benchmarks.gpu_cold under this name."""
    if name not in result:
        raise TableError(f"the results hold no section {name!r}: run benchmarks.gpu_cold {name}")
    return result[name]["results"]


def products(result: Result, dtype: str) -> list[dict[str, Any]]:
    """Return the results of benchmarks.assist for adapters of `RANK`."""
    if dtype not in result:
        raise TableError(f"the results hold no products in {dtype!r}: run benchmarks.assist")
    rows = [row for row in result[dtype]["products"] if row["rank"] == RANK]
    if not any(row["tokens"] == AIM_TOKENS for row in rows):
        raise TableError(
            f"the results hold no product of {AIM_TOKENS} tokens and rank {RANK} in {dtype}: run "
            "benchmarks.assist without --tiny"
        )
    return rows


def idle_times(result: Result) -> Result:
    """Return the times by policy; the policy with CPU workers has its own section."""
    found: Result = dict(section(result, "idle"))
    if "idle_assist" in result:
        found |= section(result, "idle_assist")
    return found


def idle_table(result: Result) -> str:
    lines = [
        (f"`{policy}`", f"{times['ready']['mean']:.2f} ms", _over(times, "host"), _over(times, "disk"))
        for policy, times in idle_times(result).items()
    ]
    lines.append(("at most", "", f"+{HOST_MS:.2f}", f"+{DISK_MS:.2f}"))
    return table(("policy", "on the device", "in host memory", "on disk, in the page cache"), lines)


def over_warm_ms(times: Result, where: str) -> float:
    """Return how many milliseconds longer the TTFT is than with the adapter on the device."""
    return float(times[where]["mean"] - times["ready"]["mean"])


def _over(times: Result, where: str) -> str:
    if where not in times:
        return "-"
    return f"{times[where]['mean']:.2f} ms, {over_warm_ms(times, where):+.2f}"


def setups_table(result: Result) -> str:
    lines = []
    for name, setup in section(result, "setups").items():
        title = f"{name}: rank {setup['rank']}, {setup['requests_per_s']} req/s"
        for policy, found in setup["policies"].items():
            is_cached = policy == "cached"
            figures = [_ms(found[metric]) if is_cached else shares(found, metric) for metric in METRICS]
            gaps = "-" if is_cached else f"{found['itl_p99_over_cached']:+.1%}"
            lines.append((title, f"`{policy}`", *figures, f"{found['interruptions_per_request']:.2f}", gaps))
    aim = f"{OVER_CACHED:+.0%}"
    lines.append(("at most", "`auto`", aim, aim, aim, "", f"{ITL_OVER_CACHED:+.0%}"))
    headings = ("setup", "policy", "TTFT, mean (p95)", "TPT", "E2E", "interruptions a request", "ITL p99")
    return table(headings, lines)


def shares(found: Result, metric: str) -> str:
    over = found["over_cached"][metric]
    return f"{over['mean']:+.1%} ({over['p95']:+.1%})"


def _ms(figures: Result) -> str:
    return f"{figures['mean']:,.1f} ms ({figures['p95']:,.1f})"


def burst_table(result: Result) -> str:
    found = section(result, "burst")
    lines = [
        (
            f"`{policy}`",
            *(f"{times[key]:.1f} ms" for key in ("mean", "p50", "p95")),
            f"{over_cached_p95(found, policy):.2f}x",
        )
        for policy, times in found.items()
    ]
    lines.append(("at most", "", "", "", f"{BURST_OVER_CACHED:.2f}x"))
    return table(("policy", "TTFT mean", "p50", "p95", "p95 over `cached`"), lines)


def over_cached_p95(found: Result, policy: str) -> float:
    return float(found[policy]["p95"] / found["cached"]["p95"])


def waits_table(result: Result) -> str:
    signal = section(result, "signal")
    trip = signal["round_trip_us"]
    lines = [
        (
            f"signal to {signal['workers']} CPU workers and back: mean, p50, p95, p99",
            ", ".join(f"{trip[key]:.1f}" for key in ("mean", "p50", "p95", "p99")) + " µs",
            f"{ROUND_TRIP_US:.0f} µs",
        )
    ]
    lines += [
        (
            f"times that the host waits for the device in a prompt's step, `{policy}`",
            str(found["host_synchronisations"]),
            "0",
        )
        for policy, found in section(result, "syncs").items()
    ]
    return table(("what", "measured", "at most"), lines)


def workers_note(result: Result) -> str:
    machine = result["machine"]
    return (
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, Python "
        f"{result['python']}, torch {result['packages']['torch']}, commit {result['git_commit']}: "
        f"{result['workers']} workers, and as many threads of torch's once they are gone; one linear from "
        f"{result['hidden']:,} to {result['hidden']:,} features, rank {RANK}.\n"
    )


def workers_table(result: Result) -> str:
    cells: dict[int, dict[str, str]] = {}
    for dtype in ("bfloat16", "float32"):
        for row in products(result, dtype):
            cells.setdefault(row["tokens"], {})[f"{dtype}, {_weights(row)}"] = _product(row)
    headings = list(cells[AIM_TOKENS])
    lines = [(f"{tokens}", *(own.get(each, "-") for each in headings)) for tokens, own in cells.items()]
    aims = [f"{WORKERS_SPEEDUP:.2f}x" if each.startswith("bfloat16") else "" for each in headings]
    lines.append((f"at least, for {AIM_TOKENS}", *aims))
    return table(("tokens", *headings), lines)


def _weights(row: Result) -> str:
    return "one set of weights" if row["layers"] == 1 else f"{row['layers']} sets in turn"


def _product(row: Result) -> str:
    return f"{row['workers_us']['p50']:.0f} µs, torch {row['torch_us']['p50']:.0f}: {row['speedup']:.2f}x"
