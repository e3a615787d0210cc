"""Tables of docs/fairness.md: shares and overload in the twin, and limits per minute on a real server."""

from __future__ import annotations

from typing import Final

from benchmarks.markdown import Result, table

_NEIGHBOURS: Final = {
    "without it": "absent",
    "at its share": "at its share",
    "first come, first served": "ten times, first come, first served",
    "fair shares": "ten times, fair shares",
    "fair shares, borrowing 10%": "ten times, `--max-borrowing 10%`",
    "fair shares, borrowing 0%": "ten times, `--max-borrowing 0%`",
}
_NEIGHBOUR_HEADS: Final = (
    *("TTFT p95", "over its share kept", "over without it", "fairness"),
    *("goodput", "of it, its own", "of all admitted, in time"),
)
_SCHEDULERS: Final = {
    "FCFS": "recorded FCFS",
    "VTC": "recorded VTC",
    "LCF": "recorded least counter first",
    "ours, fcfs": "ours, first come, first served",
    "ours, fair shares": "ours, fair shares",
}
_LIMITS: Final = {"requests_per_minute": "requests", "tokens_per_minute": "tokens"}


def neighbours_table(result: Result) -> str:
    """Show what one tenant that asks for ten times its share does to the others."""
    return table(("one tenant", *_NEIGHBOUR_HEADS), _neighbour_rows(result["results"]["neighbours"]))


def fleets_table(result: Result) -> str:
    """Show the same for fleets."""
    lines = [
        (num_replicas, *row)
        for num_replicas, found in result["results"]["fleets"].items()
        for row in _neighbour_rows(found)
    ]
    return table(("replicas", "one tenant", *_NEIGHBOUR_HEADS), lines)


def _neighbour_rows(found: Result) -> list[tuple[str, ...]]:
    return [
        (
            label,
            f"{1e3 * row['others_ttft_p95_s']:,.0f} ms",
            _times(row["over at its share"]),
            _times(row["over without it"]),
            f"{row['jain']:.2f}",
            f"{row['goodput_per_s']:.1f}/s",
            f"{row['noisy_goodput_per_s']:.1f}/s",
            f"{row['admitted_in_time']:.0%}",
        )
        for name, label in _NEIGHBOURS.items()
        for row in (found[name],)
    ]


def overload_note(result: Result) -> str:
    """Say what goodput is at twice the peak's rate."""
    found = result["results"]["overload"]
    return (
        f"At twice the peak's rate ({2 * found['rate']:.0f}/s), with objectives, goodput is "
        f"{found['ratio']:.0%} of the peak ({found['twice_per_s']:.1f}/s and {found['peak_per_s']:.1f}/s), "
        f"and {found['twice_admitted_in_time']:.0%} of the requests that are admitted are in time; without "
        f"objectives goodput is {found['twice_unbounded_per_s']:.1f}/s.\n"
    )


def paces_table(result: Result) -> str:
    """Show what objectives for the time per token do at twice the peak's rate."""
    lines = [
        (
            label,
            f"{row['refused']:,} of {row['requests']:,}",
            f"{1e3 * row['tpt_p50_s']:.1f} ms",
            f"{row['in_time']:.0%}",
            f"{row['goodput_per_s']:.1f}/s",
        )
        for label, row in result["results"]["paces"].items()
    ]
    return table(("objectives", "refused", "time per token p50", "of those served in time", "goodput"), lines)


def recorded_table(result: Result) -> str:
    """Show how evenly recorded schedulers and ours served the clients of a trace."""
    found = result["results"]["recorded"]
    lines = [
        (
            label,
            f"{row['jain']:.2f}",
            f"{row['light_ttft_p95_share']:.1%}",
            f"{row['heavy_ttft_p95_share']:.1%}",
        )
        for name, label in _SCHEDULERS.items()
        for row in (found[name],)
    ]
    heads = ("fairness", "light clients' TTFT p95, of the trace's length", "heavy clients'")
    return table(("scheduler", *heads), lines)


def quotas_table(result: Result) -> str:
    """Show what tenants with limits per minute were served."""
    lines = [
        (
            " and ".join(f"{limit:,} {_LIMITS[name]}" for name, limit in row["limits"].items()),
            f"{row['asked']:,}",
            f"{row['answered']:,}",
            f"{row['refused']:,}",
            f"{row['tokens']:,}",
            f"{row['of_limit']:.1%} ({_LIMITS[row['reached']]})",
        )
        for row in result["results"].values()
    ]
    heads = ("requests", "answered", "refused", "tokens", "of the limit; wanted 98 to 102%")
    return table(("limits per minute", *heads), lines)


def quotas_note(result: Result) -> str:
    parameters = result["parameters"]
    return (
        f"Measured {result['date'][:10]}, commit {result['git_commit'] or 'unknown'}, in "
        f"{parameters['seconds']:.0f} s, with all of them at a time.\n"
    )


def _times(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 100 else f"{ratio:.2f}x"
