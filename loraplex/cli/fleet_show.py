"""The output of `loraplex fleet simulate`, `compare` and `capacity`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import typer

from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.twin.fleet import FleetOutcome
    from loraplex.twin.fleet_compare import Capacity
    from loraplex.twin.fleet_figures import PolicyFigures
    from loraplex.twin.slo import Slo

_WHOLE_ABOVE: Final = 1000.0
"""Figures from here on are printed without decimals."""
_TIMES: Final = "TPOT: time per output token after the first. TPT: whole time over output tokens."


def show_outcome(outcome: FleetOutcome, figures: PolicyFigures, slo: Slo) -> None:
    """Print the results of one run, and how evenly replicas shared it."""
    summary = outcome.all.summary()
    typer.echo(f"{served_in_words(summary)}, {summary['output_tok_s']:,.0f} output tok/s")
    typer.echo(_attained(figures, slo))
    if summary.get("adapters_per_step") is not None:
        typer.echo(batching_in_words(summary))
    for name, row in (
        ("TTFT", summary["ttft_s"]),
        ("TPOT", outcome.all.tpot_percentiles()),
        ("TPT", summary["tpt_s"]),
    ):
        if row is not None:
            cells = "  ".join(f"{key} {value * 1e3:,.1f}" for key, value in row.items())
            typer.echo(f"{name:5} ms  {cells}")
    typer.echo(_TIMES)
    number = len(outcome.replicas)
    over = f"over {number:,} {plural('replica', number)}"
    typer.echo(f"{'':10} {'least':>10} {'mean':>10} {'most':>10}   {over}")
    for key, words in (
        ("num_requests", "requests"),
        ("mean_running", "running"),
        ("mean_waiting", "waiting"),
        ("num_adapters", "adapters"),
        ("num_loads", "loads"),
    ):
        values = [getattr(each, key) for each in outcome.replicas]
        mean = sum(values) / len(values)
        typer.echo(f"{words:10} {min(values):10,.1f} {mean:10,.1f} {max(values):10,.1f}")
    if outcome.num_moves:
        typer.echo(f"{outcome.num_moves:,} {plural('move', outcome.num_moves)} of requests between replicas")
    if outcome.most_bytes_held is not None and outcome.bytes_moved is not None:
        typer.echo(
            f"adapters: {outcome.bytes_moved / 1e9:,.1f} GB fetched, {outcome.most_bytes_held / 1e9:,.1f} GB "
            "on the host that held most"
        )
    show_overload("overloaded", outcome.overloaded_replicas())


def served_in_words(summary: Mapping[str, Any]) -> str:
    """Return how many requests of a run were served, and how many were unfinished at its end."""
    number, unfinished = summary["num_requests"], summary["num_unfinished"]
    running = f" ({unfinished:,} still ran or waited at the end)" if unfinished else ""
    return (
        f"{summary['num_served']:,} of {number:,} {plural('request', number)} served{running} in "
        f"{summary['duration_s']:,.1f} simulated seconds"
    )


def batching_in_words(summary: Mapping[str, Any]) -> str:
    """Return what a batching policy decided in a run that counts the adapters of each step."""
    merges, steps, pauses = (summary[f"num_{name}"] for name in ("merges", "merged_steps", "pauses"))
    return (
        f"{merges:,} {plural('merge', merges)}, {steps / max(summary['num_steps'], 1):.0%} of steps merged, "
        f"{pauses:,} {plural('pause', pauses)}, {summary['adapters_per_step']:.1f} adapters a step"
    )


def _attained(figures: PolicyFigures, slo: Slo) -> str:
    number = int(figures.num_undecided)
    if figures.attainment is None:
        return f"no request had ended by then, or was too late to be {slo.in_words()}"
    words = f"{figures.attainment:.2%} {slo.in_words()}"
    if number:
        words += f", without {number:,} {plural('request', number)} that the end interrupted in time"
    return words


def show_overload(begin: str, replicas: list[tuple[int, float]]) -> None:
    """Print the replicas at which requests wait, if there are any."""
    if replicas:
        where = ", ".join(f"replica {number:,} ({waiting:,.1f} requests)" for number, waiting in replicas)
        typer.echo(
            f"{begin}: it serves less than 90% of what is asked for; most wait at {where}, on the mean"
        )


def show_policies(
    means: Mapping[str, PolicyFigures],
    intervals: Mapping[str, Mapping[str, float]],
    *,
    slo: Slo,
    num_seeds: int,
    has_link: bool,
) -> None:
    """Print a line for each policy. `intervals`: half the width of each mean's 95% confidence interval.
    `has_link`: replicas fetch adapters from each other."""
    typer.echo(f"attained: {slo.in_words()}. {_TIMES}")
    if num_seeds > 1:
        typer.echo(f"Means over {num_seeds} seeds, ± half the width of their 95% confidence intervals.")
    moved = "fetched GB" if has_link else "read GB"
    rows = [("policy", "attained %", "TTFT p95 ms", "TPOT ms", "TPT ms", "loads", "busiest", moved)]
    for name, mean in means.items():
        half = intervals[name].get
        rows.append(
            (
                name,
                _cell(mean.attainment, half("attainment"), 1e2),
                _cell(mean.ttft_p95_s, half("ttft_p95_s"), 1e3),
                _cell(mean.tpot_mean_s, half("tpot_mean_s"), 1e3),
                _cell(mean.tpt_mean_s, half("tpt_mean_s"), 1e3),
                _cell(mean.adapter_loads, half("adapter_loads"), digits=0),
                _cell(mean.busiest_over_mean, half("busiest_over_mean"), unit="x"),
                _cell(mean.bytes_moved, half("bytes_moved"), 1e-9, digits=1),
            )
        )
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    for name, *cells in rows:
        ends = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        typer.echo("  ".join((f"{name:{first}}", *ends)))
    undecided = {name: mean.num_undecided for name, mean in means.items() if mean.num_undecided}
    if undecided:
        numbers = ", ".join(
            f"{name} {number:,.{0 if num_seeds == 1 else 1}f}" for name, number in undecided.items()
        )
        typer.echo(f"not in attained, as they were within the SLO when the run ended (requests): {numbers}")


def _cell(
    value: float | None, half: float | None, factor: float = 1.0, *, digits: int = 2, unit: str = ""
) -> str:
    if value is None:
        return "-"
    if value * factor >= _WHOLE_ABOVE:
        digits = 0
    around = "" if half is None else f" ±{half * factor:,.{digits}f}"
    return f"{value * factor:,.{digits}f}{unit}{around}"


def is_known(capacity: Capacity) -> bool:
    """Return whether a highest rate was found."""
    return capacity.rps is not None and math.isfinite(capacity.rps)


def capacity_in_words(capacity: Capacity) -> str:
    """Return the capacity for printing, or why there is none."""
    if capacity.rps is None:
        return f"at no rate, however low; the most was {capacity.best_attainment:.1%}"
    if not math.isfinite(capacity.rps):
        most_rps = max(rps for rps, _ in capacity.tried)
        return (
            f"holds at every rate up to {most_rps:,.1f} requests/s; give a longer workload to find its limit"
        )
    number = capacity.trial_requests
    words = (
        f"{_significant(capacity.rps):>10} requests/s, in a trial of {capacity.trial_s:,.0f} s with "
        f"{number:,} {plural('request', number)}"
    )
    if capacity.has_few:
        words += (
            f"; too few to mean much: it takes {capacity.least_requests:,} to tell so high a share; give a "
            "longer workload, or a lower --attainment"
        )
    if capacity.is_short:
        words += (
            f"; too short to mean much: the SLO needs {capacity.least_s:,.0f} s; give a longer workload, or "
            "fewer replicas"
        )
    return words


def _significant(rate: float) -> str:
    """Return a rate with two decimals, or with three significant digits if it is below 1."""
    return f"{rate:,.2f}" if rate >= 1 else f"{rate:.3g}"
