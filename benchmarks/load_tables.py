"""The tables of loads that must not slow other requests down: long queues, huge requests, busy programs."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.holdups import BASELINES
from benchmarks.markdown import Result, table

_HEALTH_MS: Final = 50
_GAPS: Final = 1.1


def queue_table(result: Result) -> str:
    """Show the cost of waiting requests for a step, and for a cancellation."""
    steps, cancels = result["steps"], result["cancels"]
    lines = [
        (
            f"{int(count):,}",
            f"{ms:.2f} ms",
            f"{cancels['cancel_us'][count]:.1f} µs" if count in cancels["cancel_us"] else "",
        )
        for count, ms in steps["schedule_ms"].items()
    ]
    lines.append(("10,000 over 10 / over 100", f"{steps['ratio']:.2f}x", f"{cancels['ratio']:.2f}x"))
    return table(("requests that wait", "deciding a step", "cancelling one of them"), lines)


def queue_note(result: Result) -> str:
    return (
        f"Measured {result['date'][:10]} on {result['machine']['cpu']}, Python {result['python']}, commit "
        f"{result['git_commit'] or 'unknown'}, beside {result['num_running']} requests that decode.\n"
    )


def shared_table(result: Result) -> str:
    """Show engines alone and beside a busy program on each core."""
    cores = result["machine"]["cores"]
    titles = {"alone": "alone", "one_busy_program_per_core": f"beside {cores} busy programs on {cores} cores"}
    kinds = ("all threads", "one thread", "automatic")
    lines = [
        (
            title,
            *(f"{result[name]['tokens_per_s'][kind]:,.1f}" for kind in kinds),
            f"{result[name]['automatic_over_all_threads']:.2f}x",
            f"{result[name]['automatic_over_one_thread']:.2f}x",
        )
        for name, title in titles.items()
    ]
    heads = (*(f"{kind}, tok/s" for kind in kinds), "automatic over all threads", "over one thread")
    return table(("one request at a time", *heads), lines)


def shared_note(result: Result) -> str:
    machine, load = result["machine"], result["load_before"]
    return (
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, "
        f"commit {result['git_commit'] or 'unknown'}, medians of {result['parameters']['repeats']} runs in "
        f"turn; the machine's own load before was {load[0]:.1f}.\n"
    )


def holdups_table(result: Result) -> str:
    """Show streams and /health beside huge, many or vanishing requests."""
    lines = [
        (
            f"{name}, against {BASELINES[name]}" if name in BASELINES else name,
            _statuses(row["outcomes"]),
            f"{row['calm']['health_p99_ms']:.0f} -> {row['disturbed']['health_p99_ms']:.0f} ms",
            f"{row['gap_mean_ratio']:.2f}x",
            f"{row['gap_p99_ratio']:.2f}x",
        )
        for name, row in result["disturbances"].items()
    ]
    lines.append(("wanted", "", f"{_HEALTH_MS} ms", f"{_GAPS}x", f"{_GAPS}x"))
    heads = ("answered", "/health p99, without -> with", "streams' mean gap", "p99 gap")
    return table(("meanwhile", *heads), lines)


def holdups_note(result: Result) -> str:
    machine, rss = result["machine"], result["rss_mib"]
    return (
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, commit "
        f"{result['git_commit'] or 'unknown'}, rounds: {result['parameters']['rounds']}. Memory of the "
        f"HTTP process: {rss['at_start']} MiB at the start, {rss['at_end']} MiB at the end.\n"
    )


_OVERLOAD_HEADS: Final = ("requests/s", "in time, per s", "refused, failed", "TTFT p95", "a refusal p99")


def overload_table(result: Result) -> str:
    """Show goodput at the peak, at twice its rate, and both without the bound."""
    found = result["results"]
    without, bound = found["unbounded"], found["bounded"]
    rows = [
        ("the peak, without a bound", without["peak"]),
        ("twice its rate, without a bound", without["overload"]),
        *(("the peak", window) for window in bound["peak"]),
        *(("twice its rate", window) for window in bound["overload"]),
    ]
    lines = [(name, *_overload_cells(window)) for name, window in rows]
    lines.append(("goodput over the peak's; wanted 95%", "", f"{found['ratio']:.0%}", "", "", "50 ms"))
    return table(("rate", *_OVERLOAD_HEADS), lines)


def overload_tenants_table(result: Result) -> str:
    """Show the same where one tenant sends all that is too much, and what the others get."""
    found = result["results"]
    bound = found["bounded"]
    rows = [
        ("the peak, without a bound", found["unbounded"]["peak"]),
        *(("the peak", window) for window in bound["peak"]),
        *(("twice its rate", window) for window in bound["overload"]),
    ]
    lines = [(name, *_overload_cells(window), _percent(window["others_in_time"])) for name, window in rows]
    lines.append(("goodput over the peak's; wanted 95%", "", f"{found['ratio']:.0%}", "", "", "50 ms", ""))
    return table(("rate", *_OVERLOAD_HEADS, "of the others' requests, in time"), lines)


def _overload_cells(window: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{window['rate']:.1f}",
        f"{window['goodput_per_s']:.2f}",
        f"{window['refused']}, {window['failed']} of {window['requests']}",
        _seconds(window["ttft_p95_s"]),
        "" if window["refusal_p99_ms"] is None else f"{window['refusal_p99_ms']:.0f} ms",
    )


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"


def overload_note(result: Result) -> str:
    parameters = result["parameters"]
    return _overload_note(result, f"`{parameters['server_options']} --max-ttft {parameters['max_ttft_s']:g}`")


def overload_tenants_note(result: Result) -> str:
    parameters = result["parameters"]
    return _overload_note(
        result, f"`{parameters['server_options']}`, objectives of {parameters['max_ttft_s']:g} s"
    )


def _overload_note(result: Result, setting: str) -> str:
    machine, window_s = result["machine"], result["parameters"]["window_s"]
    return (
        f"Measured {result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, commit "
        f"{result['git_commit'] or 'unknown'}, {setting}, windows of {window_s:g} s.\n"
    )


def quick_profile_note(result: Result) -> str:
    """Say how long a quick profile takes, and how closely it fits."""
    machine, found = result["machine"], result["results"]
    decode, prefill = (f"{found[kind]['mean_error']:.1%}" for kind in ("decode", "prefill"))
    return (
        f"For the demo's model ({found['model']}) it took {found['duration_s']:.0f} s; its predictions of "
        f"steps that were not fitted are {decode} off on average (decode) and {prefill} (prompts). Measured "
        f"{result['date'][:10]} on {machine['cores']} cores of {machine['cpu']}, commit "
        f"{result['git_commit'] or 'unknown'}.\n"
    )


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _statuses(outcomes: list[dict[str, Any]]) -> str:
    """Return the HTTP statuses that a disturbance was answered with."""
    found: set[str] = set()
    for outcome in outcomes:
        found |= {str(status) for status in outcome.get("statuses", ())}
    return ", ".join(sorted(found)) or "-"
