"""`loraplex twin`: what an engine would do, without one.

Imports wait until a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from loraplex.cli.flags import App
from loraplex.cli.json_out import check_picture, check_writable, write_json
from loraplex.cli.profile_table import warn_of_poor_fits
from loraplex.core.errors import UserError
from loraplex.core.progress import shown_progress
from loraplex.core.words import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from loraplex.twin.compare import LiveEngine
    from loraplex.twin.fleet import EngineFigures
    from loraplex.twin.outcome import Outcome
    from loraplex.twin.replay import Profile, ReplayOptions
    from loraplex.workload.jsonl import WorkloadRequest

app = App(help="What an engine would do, simulated in seconds.", no_args_is_help=True)

_Profile = Annotated[Path, typer.Option("--profile", help="From `loraplex profile` or `profile fit`.")]
_Workload = Annotated[Path, typer.Option("--workload", help="A .jsonl file, one request a line.")]
_Model = Annotated[
    str | None, typer.Option(help="Refuse a profile of any other model; named as in the profile.")
]
_Adapters = Annotated[int | None, typer.Option(min=1, help="How many; default: as the workload says.")]
_Ranks = Annotated[
    str | None,
    typer.Option(help="Ranks of the adapters, over and over: 8,16,32; default: the workload's, or 16."),
]
_Slots = Annotated[int | None, typer.Option(min=1, help="Of an engine with slots; default: one for each.")]
_Seconds = Annotated[float | None, typer.Option("--seconds", help="End after so many simulated seconds.")]
_KvTokens = Annotated[
    int | None, typer.Option(min=16, help="KV memory, instead of the profile's; on a GPU adapters share it.")
]
_AdapterMib = Annotated[
    float | None,
    typer.Option(help="Size of each adapter (our own engine); default: by its rank, as the profile has it."),
]
_Modules = Annotated[
    str | None, typer.Option(help="What adapters are on (our own engine): q,k,v (default) or all.")
]
_MaxRunning = Annotated[
    int | None, typer.Option(min=1, help="Requests in a step at most (our own engine); default: 256.")
]
_Engines = Annotated[
    int | None,
    typer.Option(help="A fleet of so many (our own engine), behind a router; default: one, without."),
]
_Routing = Annotated[
    str | None,
    typer.Option(help="adapter (default): each belongs to one engine; round-robin: engines take turns."),
]
_Json = Annotated[Path | None, typer.Option("--json", help="Write the figures here.")]


_DEFAULT_RANKS = (16,)
_MOST_ADAPTERS = 1_000_000
"""That a workload has unless somebody says so: each is known to the scheduler, used or not."""
_POOR_ERROR = 0.15


class _Options(NamedTuple):
    """The options that both commands that simulate have."""

    adapters: int | None
    ranks: str | None
    slots: int | None
    kv_tokens: int | None
    adapter_mib: float | None
    modules: str | None
    max_running: int | None
    seconds: float | None = None


@app.command()
def run(
    profile: _Profile,
    workload: _Workload,
    model: _Model = None,
    adapters: _Adapters = None,
    ranks: _Ranks = None,
    slots: _Slots = None,
    seconds: _Seconds = None,
    kv_tokens: _KvTokens = None,
    adapter_mib: _AdapterMib = None,
    modules: _Modules = None,
    max_running: _MaxRunning = None,
    engines: _Engines = None,
    routing: _Routing = None,
    json_out: _Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw requests over time to this .png.")] = None,
) -> None:
    """Simulate a workload on a profiled engine, or on a fleet of them."""
    check_writable(json_out, inputs=(profile, workload))
    check_picture(plot, inputs=(profile, workload, *([] if json_out is None else [json_out])))
    if engines is None and routing is not None:
        raise typer.BadParameter("has no effect without --engines", param_hint="--routing")
    options = _Options(adapters, ranks, slots, kv_tokens, adapter_mib, modules, max_running, seconds)
    if engines is None:
        outcome, shares = _replay(profile, workload, model, options), None
    else:
        outcome, shares = _replay_fleet(profile, workload, model, options, engines, routing or "adapter")
    summary = outcome.summary()
    _show(summary)
    if shares is not None:
        _show_engines(shares)
    if json_out is not None:
        document = {"summary": summary, "timeline": asdict(outcome.timeline()), "requests": _rows(outcome)}
        if shares is not None:
            document["engines"] = [asdict(each) for each in shares]
        write_json(json_out, document)
    if plot is not None:
        from loraplex.cli.twin_plot import write_plot

        on = profile.name if engines is None else f"{engines} {plural('engine', engines)} of {profile.name}"
        write_plot(outcome, plot, workload=workload.name, profile=on)
        typer.echo(f"wrote {plot}")


@app.command()
def compare(
    profile: _Profile,
    workload: _Workload,
    live: Annotated[
        Path,
        typer.Option(
            help="What `loraplex bench serve` or `bench engine serve` wrote (--json) of the same workload."
        ),
    ],
    model: _Model = None,
    adapters: _Adapters = None,
    ranks: _Ranks = None,
    slots: _Slots = None,
    kv_tokens: _KvTokens = None,
    adapter_mib: _AdapterMib = None,
    modules: _Modules = None,
    max_running: _MaxRunning = None,
    json_out: _Json = None,
) -> None:
    """Hold a simulation against a run of the engine itself.

    A file of `bench engine serve` tells of its adapters, memory and steps, and options only say otherwise.
    Of a server's engine nothing is known but the profile: say what it was started with.
    """
    from loraplex.twin.compare import check_profile, engine_of
    from loraplex.twin.compare import compare as compare_figures
    from loraplex.twin.replay import replay

    check_writable(json_out, inputs=(profile, workload, live))
    try:
        measured = json.loads(live.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{live}: cannot be read ({error})") from error
    options = _Options(adapters, ranks, slots, kv_tokens, adapter_mib, modules, max_running)
    found = _read_profile(profile, model)
    with _of_file(live):
        engine = engine_of(measured)
        if engine is not None:
            check_profile(found, engine)
    outcome = replay(found, *_read(workload, options, engine))
    with _of_file(live):
        figures = compare_figures(outcome, measured)
    for name, words, factor in (
        ("output_tok_s", "output tok/s", 1.0),
        ("itl_s", "ITL ms", 1e3),
        ("ttft_s", "TTFT ms", 1e3),
    ):
        if (row := figures.get(name)) is not None:
            pair = f"twin {row['twin'] * factor:12,.2f}  live {row['live'] * factor:12,.2f}"
            typer.echo(f"{words:13} {pair}  SMAPE {row['smape']:5.1f}%")
    if json_out is not None:
        write_json(json_out, figures)


@app.command()
def validate(
    runs: Annotated[Path, typer.Option(help="Recorded runs to predict (CSV, or packed: .csv.gz).")],
    fit: Annotated[list[Path], typer.Option(help="Recorded runs to learn from; may be given again.")],
    json_out: _Json = None,
) -> None:
    """Predict recorded runs from other ones, and tell how far off that is.

    Runs to be predicted are left out of those to learn from. Nothing that was measured of them is looked at
    before they are predicted.
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
        from loraplex.bench.environment import environment

        profiles = {model: dict(profile.quality) for model, profile in fitted.profiles.items()}
        fitted_to = {"num_runs": fitted.num_runs, "quality": profiles}
        write_json(
            json_out, {**found, "fit": fitted_to, "environment": environment(("loraplex", "numpy", "numba"))}
        )


@contextmanager
def _of_file(path: Path) -> Iterator[None]:
    """Name the file in the errors that the block raises."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _read_profile(path: Path, model: str | None) -> Profile:
    """Read a profile, with a warning if it was measured badly: what comes of it is no better."""
    from loraplex.perf.cost_model import CostModel
    from loraplex.twin.replay import read_any_profile

    profile = read_any_profile(path, model)
    if not isinstance(profile, CostModel):
        return profile
    advice = f"the twin is no better than {path.name}, so measure again when the machine is idle"
    if not warn_of_poor_fits(profile, advice) and (held_out := profile.held_out) is not None:
        worst = max(held_out.decode.mean_error, held_out.prefill.mean_error)
        if worst > _POOR_ERROR:
            typer.echo(
                f"the profile is off by {worst:.0%} on the mean for steps it was not fitted to; measure "
                "again with `loraplex profile` while the machine does nothing else",
                err=True,
            )
    return profile


def _replay(profile: Path, workload: Path, model: str | None, options: _Options) -> Outcome:
    from loraplex.twin.replay import replay

    return replay(_read_profile(profile, model), *_read(workload, options))


def _replay_fleet(
    profile: Path, workload: Path, model: str | None, options: _Options, num_engines: int, routing: str
) -> tuple[Outcome, Sequence[EngineFigures]]:
    from loraplex.twin.fleet import replay_fleet, routing_of

    if num_engines < 1:
        raise typer.BadParameter(f"must be at least 1, not {num_engines}", param_hint="--engines")
    named = routing_of(routing)
    found = _read_profile(profile, model)
    fleet = replay_fleet(found, *_read(workload, options), num_engines=num_engines, routing=named)
    return fleet.all, fleet.engines


def _read(
    workload: Path, options: _Options, engine: LiveEngine | None = None
) -> tuple[list[WorkloadRequest], ReplayOptions]:
    """`engine`: what holds where no option says otherwise."""
    from loraplex.core.modules import module_names
    from loraplex.twin.replay import ReplayOptions
    from loraplex.workload.jsonl import WorkloadFile

    if options.seconds is not None and not options.seconds > 0:
        raise typer.BadParameter("must be more than 0", param_hint="--seconds")
    mib = options.adapter_mib
    if mib is not None and not 0 < mib < math.inf:
        raise typer.BadParameter("must be more than 0", param_hint="--adapter-mib")
    file = WorkloadFile(workload)
    requests, header = list(file), file.header
    named = max(request.adapter for request in requests) + 1
    if header is None and options.adapters is None and named > _MOST_ADAPTERS:
        raise UserError(
            f"{workload}: a request is on adapter {named - 1}, counted from 0, so there would be {named:,}; "
            "give --adapters if that is meant"
        )
    chosen = ReplayOptions(
        num_adapters=options.adapters or (named if header is None else header.num_adapters),
        ranks=(_DEFAULT_RANKS if header is None else header.ranks)
        if options.ranks is None
        else _ranks(options.ranks),
        num_slots=options.slots,
        until_s=math.inf if options.seconds is None else options.seconds,
        kv_tokens=options.kv_tokens,
        adapter_bytes=None if mib is None else max(int(mib * (1 << 20)), 1),
        modules=None if options.modules is None else module_names(options.modules),
        max_running=options.max_running,
    )
    if engine is None:
        return requests, chosen
    chosen = _as_live(chosen, options, engine)
    wrapped = (replace(each, adapter=each.adapter % max(chosen.num_adapters, 1)) for each in requests)
    return list(wrapped), chosen


def _as_live(chosen: ReplayOptions, options: _Options, engine: LiveEngine) -> ReplayOptions:
    return replace(
        chosen,
        num_adapters=options.adapters or engine.num_adapters,
        ranks=engine.ranks if options.ranks is None else chosen.ranks,
        modules=chosen.modules or engine.modules,
        kv_tokens=chosen.kv_tokens or engine.kv_tokens,
        work=engine.work,
        staged=True,
    )


def _ranks(text: str) -> tuple[int, ...]:
    try:
        ranks = tuple(int(each) for each in text.split(","))
    except ValueError:
        ranks = ()
    if not ranks or min(ranks) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of ranks such as 8,16,32", param_hint="--ranks")
    return ranks


def _show(summary: dict[str, Any]) -> None:
    num_steps = summary["num_steps"]
    typer.echo(
        f"{summary['num_served']} of {summary['num_requests']} requests served in "
        f"{summary['duration_s']:.1f} simulated seconds, {num_steps} {plural('step', num_steps)}"
    )
    typer.echo(f"{summary['output_tok_s']:,.1f} output tok/s, {summary['input_tok_s']:,.1f} input tok/s")
    loads, preemptions = summary["num_loads"], summary["num_preemptions"]
    typer.echo(
        f"{loads:,} {plural('load', loads)} of adapters, {preemptions:,} {plural('preemption', preemptions)}"
    )
    for name in ("ttft_s", "itl_s", "tpt_s", "e2e_s"):
        row = summary[name]
        if row is not None:
            cells = "  ".join(f"{key} {value * 1e3:,.1f}" for key, value in row.items())
            typer.echo(f"{name[:-2].upper():5} ms  {cells}")
    if summary["num_requests"] == 0:
        typer.echo("no request comes before --seconds are over")
    if summary["num_lost"]:
        lost = summary["num_lost"]
        typer.echo(f"{lost:,} {plural('request', lost)} lost: their client had no connection left")
    if summary["starved"]:
        typer.echo("overloaded: it serves less than 90% of what is asked for")


def _show_engines(engines: Sequence[EngineFigures]) -> None:
    typer.echo(f"{len(engines)} {plural('engine', len(engines)):11} least     mean     most")
    for name, words in (
        ("num_requests", "requests"),
        ("mean_running", "running"),
        ("mean_waiting", "waiting"),
        ("num_adapters", "adapters"),
        ("num_loads", "loads"),
    ):
        values = [getattr(each, name) for each in engines]
        mean = sum(values) / len(values)
        typer.echo(f"{words:10} {min(values):10,.1f} {mean:8,.1f} {max(values):8,.1f}")


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
        }
        for each in outcome.requests
    ]
