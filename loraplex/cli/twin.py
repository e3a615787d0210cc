"""`loraplex twin`: simulate an engine.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex.cli import twin_batching
from loraplex.cli.batching_options import BatchingPolicy, MaxDelay
from loraplex.cli.flags import App
from loraplex.cli.fleet_show import batching_in_words, served_in_words
from loraplex.cli.json_out import check_picture, check_writable, files_saved, save_json, save_picture
from loraplex.cli.tenant_options import MaxBorrowing, MaxTtft, Tenants
from loraplex.cli.tenant_show import show_tenants
from loraplex.cli.twin_options import (
    AdapterMib,
    Adapters,
    CpuWorkers,
    JsonPath,
    KvSwapMemory,
    KvTokens,
    MaxCopyRate,
    MaxRunning,
    Model,
    Modules,
    ProfilePath,
    Ranks,
    Seconds,
    Slots,
    StartPolicy,
    TwinOptions,
    WorkloadPath,
    read_inputs,
    read_profile_of,
)
from loraplex.core.batching import Batching
from loraplex.core.errors import UserError
from loraplex.core.progress import shown_progress
from loraplex.core.words import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from loraplex.twin.outcome import Outcome

app = App(help="What an engine would do, simulated in seconds.", no_args_is_help=True)


@app.command()
def run(
    profile: ProfilePath,
    workload: WorkloadPath,
    model: Model = None,
    adapters: Adapters = None,
    ranks: Ranks = None,
    slots: Slots = None,
    seconds: Seconds = None,
    kv_tokens: KvTokens = None,
    adapter_mib: AdapterMib = None,
    modules: Modules = None,
    max_running: MaxRunning = None,
    cold_start: StartPolicy = None,
    cpu_workers: CpuWorkers = None,
    max_copy_gb_per_s: MaxCopyRate = None,
    batching: BatchingPolicy = Batching.FCFS,
    max_delay_by_grouping: MaxDelay = None,
    tenant: Tenants = None,
    max_borrowing: MaxBorrowing = None,
    max_ttft: MaxTtft = None,
    kv_swap_memory: KvSwapMemory = None,
    json_out: JsonPath = None,
    plot: Annotated[Path | None, typer.Option(help="Draw requests over time to this .png.")] = None,
) -> None:
    """Simulate a workload on a profiled engine. Many of them behind a router: `loraplex fleet simulate`."""
    check_writable(json_out, inputs=(profile, workload))
    check_picture(plot, inputs=(profile, workload, *([] if json_out is None else [json_out])))
    options = TwinOptions(
        adapters=adapters,
        ranks=ranks,
        slots=slots,
        kv_tokens=kv_tokens,
        adapter_mib=adapter_mib,
        modules=modules,
        max_running=max_running,
        seconds=seconds,
        cold_start=cold_start,
        cpu_workers=cpu_workers,
        max_copy_gb_per_s=max_copy_gb_per_s,
        batching=batching,
        max_delay=max_delay_by_grouping,
        tenants=tenant,
        max_borrowing=max_borrowing,
        max_ttft=max_ttft,
        kv_swap_memory=kv_swap_memory,
    )
    outcome, tenants = _replay(profile, workload, model, options)
    summary = outcome.summary() | tenants

    def draw(path: Path) -> None:
        from loraplex.cli.twin_plot import draw_outcome

        save_picture(path, draw_outcome(outcome, workload=workload.name, profile=profile.name))

    with files_saved((json_out, lambda path: save_json(path, _figures(outcome, summary))), (plot, draw)):
        _show(summary, is_overloaded=outcome.is_overloaded())


app.command()(twin_batching.batching)


@app.command()
def compare(
    profile: ProfilePath,
    workload: WorkloadPath,
    live: Annotated[
        Path,
        typer.Option(
            help="What `loraplex bench serve` or `bench engine serve` wrote (--json) of the same workload."
        ),
    ],
    model: Model = None,
    adapters: Adapters = None,
    ranks: Ranks = None,
    slots: Slots = None,
    kv_tokens: KvTokens = None,
    adapter_mib: AdapterMib = None,
    modules: Modules = None,
    max_running: MaxRunning = None,
    json_out: JsonPath = None,
    plot: Annotated[Path | None, typer.Option(help="Draw both runs side by side to this .png.")] = None,
) -> None:
    """Compare a simulation with a run of the engine itself.

    A file of `bench engine serve` has the engine's adapters, memory and steps, which options override. Of a
    server's engine only the profile is known: give the options that it was started with.
    """
    from loraplex.twin.compare import check_profile, engine_of
    from loraplex.twin.compare import compare as compare_figures
    from loraplex.twin.replay import replay

    inputs = (profile, workload, live)
    check_writable(json_out, inputs=inputs)
    check_picture(plot, inputs=(*inputs, *([] if json_out is None else [json_out])))
    measured = _measured(live)
    options = TwinOptions(
        adapters=adapters,
        ranks=ranks,
        slots=slots,
        kv_tokens=kv_tokens,
        adapter_mib=adapter_mib,
        modules=modules,
        max_running=max_running,
    )
    found = read_profile_of(profile, model)
    with _of_file(live):
        engine = engine_of(measured)
        if engine is not None:
            check_profile(found, engine)
    outcome = replay(found, *read_inputs(workload, options, engine))
    with _of_file(live):
        figures = compare_figures(outcome, measured)

    def draw(path: Path) -> None:
        from loraplex.cli.compare_plot import draw_comparison, pairs_of

        pairs = pairs_of(figures, outcome.summary(), measured)
        save_picture(path, draw_comparison(pairs, title=f"{workload.name} on {profile.name}, {live.name}"))

    with files_saved((json_out, lambda path: save_json(path, figures)), (plot, draw)):
        _show_compared(figures)


def _show_compared(figures: dict[str, dict[str, float]]) -> None:
    for name, words, factor in (
        ("output_tok_s", "output tok/s", 1.0),
        ("itl_s", "ITL ms", 1e3),
        ("ttft_s", "TTFT ms", 1e3),
    ):
        if (row := figures.get(name)) is not None:
            pair = f"twin {row['twin'] * factor:12,.2f}  live {row['live'] * factor:12,.2f}"
            typer.echo(f"{words:13} {pair}  SMAPE {row['smape']:5.1f}%")


@app.command()
def validate(
    runs: Annotated[Path, typer.Option(help="Recorded runs to predict (CSV, or packed: .csv.gz).")],
    fit: Annotated[list[Path], typer.Option(help="Recorded runs to learn from; may be given again.")],
    json_out: JsonPath = None,
) -> None:
    """Predict recorded runs from other ones, and print the errors.

    Runs to be predicted are left out of those to learn from, and their measurements are read only after
    they are predicted.
    """
    from loraplex.twin.recorded_runs import read_runs
    from loraplex.twin.scores import in_authors_unit
    from loraplex.twin.validate import fit_for, predict, report

    check_writable(json_out, inputs=(runs, *fit))
    asked = read_runs(runs)
    if not asked.setups:
        raise UserError(f"{runs}: no run in it says at which rates requests came")
    if asked.num_others:
        lines = f"{asked.num_others} {plural('line', asked.num_others)}"
        typer.echo(f"left out {lines} of {runs} without the rates at which requests came")
    learnt = [read_runs(path) for path in fit]
    expected = "some minutes for each model; an upper bound follows"
    with shown_progress("fitting", expected=expected, left="at most") as progress:
        fitted = fit_for(asked.setups, learnt, progress=progress)
    num_runs = len(asked.setups)
    with shown_progress("predicting", expected=f"{num_runs} {plural('run', num_runs)}") as progress:
        predictions = predict(fitted, asked.setups, progress=progress)
    found = report(predictions, asked.measured)
    if json_out is not None:
        from loraplex.bench.environment import environment

        profiles = {model: dict(profile.quality) for model, profile in fitted.profiles.items()}
        fitted_to = {"num_runs": fitted.num_runs, "quality": profiles}
        save_json(
            json_out, {**found, "fit": fitted_to, "environment": environment(("loraplex", "numpy", "numba"))}
        )
    if found["num_not_predicted"]:
        why = "; ".join(f"{count}: {reason}" for reason, count in found["not_predicted"].items())
        typer.echo(f"{found['num_not_predicted']} of {len(predictions)} runs are not predicted ({why})")
    for name, percent in found["smape"].items():
        half = in_authors_unit(percent)
        typer.echo(f"{name:18} SMAPE {percent:6.2f}%  ({half:5.2f}% as |p - m| / (|p| + |m|))")
    typer.echo(
        f"{'starvation':18} macro-F1 {found['starvation_f1']:.3f}, "
        f"{found['num_starved']} of {found['num_compared']} runs are starved"
    )
    if json_out is not None:
        typer.echo(f"wrote {json_out}")


def _measured(live: Path) -> dict[str, Any]:
    """Return what a benchmark wrote."""
    try:
        found: dict[str, Any] = json.loads(live.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{live}: cannot be read ({error})") from error
    return found


@contextmanager
def _of_file(path: Path) -> Iterator[None]:
    """Name the file in the errors that the block raises."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _replay(
    profile: Path, workload: Path, model: str | None, options: TwinOptions
) -> tuple[Outcome, dict[str, Any]]:
    """Return the outcome, and the figures of tenants if there are any."""
    from loraplex.twin.replay import replay
    from loraplex.twin.tenant_figures import summary_of

    found = read_profile_of(profile, model)
    requests, chosen = read_inputs(workload, options)
    if chosen.limits_waiting:
        from loraplex.fleet.policy import Policy
        from loraplex.twin.fleet_run import FleetOptions, FleetRuns

        one = FleetRuns(found, requests, FleetOptions(num_replicas=1, replay=chosen))
        outcome = one.run(Policy.of("round-robin", None)).all
    else:
        outcome = replay(found, requests, chosen)
    return outcome, summary_of(outcome, chosen.tenants, chosen.max_ttft_s)


def _show(summary: dict[str, Any], *, is_overloaded: bool) -> None:
    num_steps = summary["num_steps"]
    typer.echo(f"{served_in_words(summary)}, {num_steps:,} {plural('step', num_steps)}")
    typer.echo(f"{summary['output_tok_s']:,.1f} output tok/s, {summary['input_tok_s']:,.1f} input tok/s")
    loads, preemptions = summary["num_loads"], summary["num_preemptions"]
    typer.echo(
        f"{loads:,} {plural('load', loads)} of adapters, {preemptions:,} {plural('preemption', preemptions)}"
    )
    if summary["num_swapped_out"]:
        outs, ins = summary["num_swapped_out"], summary["num_swapped_in"]
        typer.echo(f"{outs:,} KV {plural('block', outs)} swapped to the host, {ins:,} back")
    if summary.get("adapters_per_step") is not None:
        typer.echo(batching_in_words(summary))
    for name in ("ttft_s", "itl_s", "tpt_s", "e2e_s"):
        row = summary[name]
        if row is not None:
            cells = "  ".join(f"{key} {value * 1e3:,.1f}" for key, value in row.items())
            typer.echo(f"{name[:-2].upper():5} ms  {cells}")
    if summary["num_lost"]:
        lost = summary["num_lost"]
        typer.echo(f"{lost:,} {plural('request', lost)} lost: their client had no connection left")
    show_tenants(summary)
    if is_overloaded:
        typer.echo("overloaded: it serves less than 90% of what is asked for")


def _figures(outcome: Outcome, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the file of a run: its summary, its course and its requests."""
    return {"summary": summary, "timeline": asdict(outcome.timeline()), "requests": _rows(outcome)}


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    return [
        {
            "arrival_s": each.request.arrival_s,
            "adapter": each.request.adapter,
            "prompt_tokens": each.request.prompt_tokens,
            "output_tokens": each.request.output_tokens,
            "first_token_s": each.first_token_s,
            "finish_s": each.finish_s,
            "failed": each.failed,
            "lost": each.lost,
            "refused": each.refused,
            **({"tenant": each.request.tenant} if each.request.tenant else {}),
        }
        for each in outcome.requests
    ]
