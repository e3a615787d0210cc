"""`loraplex plan`: how many GPUs, and which adapter where.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli.flags import App
from loraplex.cli.json_out import check_picture, check_writable, files_saved, save_json, save_picture
from loraplex.cli.table import Column, number_column, print_table
from loraplex.cli.twin_options import JsonPath, ProfilePath, read_profile_of
from loraplex.core.errors import UserError
from loraplex.core.progress import shown_progress
from loraplex.core.whole_file import write_whole
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.planner.check import GpuCheck, PlanCheck
    from loraplex.planner.demand import Demand
    from loraplex.planner.plan import Plan
    from loraplex.planner.surrogate import Surrogate, SurrogateJudge

app = App(help="How many GPUs, and which adapter where: made, checked and shown.", no_args_is_help=True)

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A file of `loraplex plan make`.")]
_MOST_GPUS: Final = 10_000
_TRAINED_BY: Final = ("loraplex", "numpy", "scikit-learn")
"""Packages whose versions a surrogate records."""
_STARVES: Final = 1
"""Exit status of a check that finds a GPU starving."""


@app.command()
def train(
    profile: ProfilePath,
    out: Annotated[Path, typer.Option(help="Write the surrogate to this file.")],
    dataset: Annotated[
        Path, typer.Option(help="The simulated runs; continued if the file has some of them already.")
    ],
    prompt_tokens: Annotated[float, typer.Option(min=1, help="Tokens of every prompt.")],
    output_tokens: Annotated[float, typer.Option(min=1, help="Tokens of every answer.")],
    rows: Annotated[
        int, typer.Option(min=150, max=10_000_000, help="How many runs; the whole grid has 145,200 points.")
    ] = 2000,
    seconds: Annotated[float, typer.Option(min=60, help="Simulated seconds of each run.")] = 3600.0,
    small: Annotated[
        bool, typer.Option("--small", help="One tree of at most 32 rules each, instead of a forest.")
    ] = False,
    paper_search: Annotated[
        bool, typer.Option("--paper-search", help="Search all of the paper's options, which takes hours.")
    ] = False,
    rules: Annotated[
        Path | None, typer.Option(help="Write the rules to this file, to be read; with --small.")
    ] = None,
) -> None:
    """Train a surrogate of an engine with slots: a file that answers in microseconds what the twin simulates.

    Runs are simulated on all cores until the dataset has so many; interrupted, the same command goes on.
    """
    if rules is not None and not small:
        raise typer.BadParameter("a forest has too many rules to read; give --small", param_hint="--rules")
    _check_finite(prompt_tokens=prompt_tokens, output_tokens=output_tokens, seconds=seconds)
    check_writable(out, "--out", inputs=(profile, dataset))
    check_writable(rules, "--rules", inputs=(profile, dataset, out))
    from loraplex.bench.environment import environment
    from loraplex.perf.slot_profile import SlotProfile
    from loraplex.planner.dataset import Simulated, make_dataset, read_dataset
    from loraplex.planner.searches import Search
    from loraplex.planner.surrogate_json import write_surrogate
    from loraplex.planner.training import train_forest, train_small_tree
    from loraplex.twin.run_workload import Lengths

    found = read_profile_of(profile, None)
    if not isinstance(found, SlotProfile):
        raise UserError(
            "the profile is of an engine without slots; `plan make` asks the twin of it, without training"
        )
    simulated = Simulated(
        profile=found,
        profile_name=str(profile),
        lengths=Lengths(prompt_tokens, output_tokens),
        duration_s=seconds,
    )
    with shown_progress("simulating runs") as report:
        make_dataset(dataset, simulated, num_rows=rows, progress=report)
    search = Search.PAPER if paper_search else None
    with shown_progress("training", left=None) as report:
        train_one = train_small_tree if small else train_forest
        trained = train_one(read_dataset(dataset), search, progress=report)
    with files_saved(
        (out, lambda path: write_surrogate(path, trained, environment(_TRAINED_BY))),
        (rules, lambda path: write_whole(path, _rules_of(trained))),
    ):
        _show_accuracy(trained)


@app.command()
def make(
    profile: ProfilePath,
    out: Annotated[Path, typer.Option(help="Write the plan to this file.")],
    workload: Annotated[
        Path | None, typer.Option(help="A .jsonl file whose requests show rates and lengths.")
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(help="A .csv file with the columns name, rank and rate_rps, instead of a workload."),
    ] = None,
    prompt_tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean tokens of a prompt, with --adapters.")
    ] = None,
    output_tokens: Annotated[
        float | None, typer.Option(min=1, help="Mean tokens of an answer, with --adapters.")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=_MOST_GPUS, help="How many GPUs there are; default: as few as will do."),
    ] = None,
    surrogate: Annotated[
        Path | None,
        typer.Option(help="Ask a file of `plan train`, and not the twin: in milliseconds, and less exactly."),
    ] = None,
    packer: Annotated[
        str,
        typer.Option(
            help="What divides the adapters: max-pack, improved, least-rate, max-base, max-base-half or "
            "random."
        ),
    ] = "max-pack",
    json_out: JsonPath = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the plan to this .png.")] = None,
) -> None:
    """Plan which GPU serves which adapters, with how many slots, judged by the twin or a surrogate."""
    inputs = tuple(path for path in (profile, workload, adapters, surrogate) if path is not None)
    check_writable(out, "--out", inputs=inputs)
    check_writable(json_out, inputs=(*inputs, out))
    check_picture(plot, inputs=(*inputs, out))
    from loraplex.planner.make import make_plan
    from loraplex.planner.plan_file import write_plan

    demand = _demand(workload, adapters, prompt_tokens, output_tokens)
    found = read_profile_of(profile, None)
    judge = None if surrogate is None else _judge_of(surrogate, found, demand)
    with shown_progress("planning", left=None) as report:
        plan = make_plan(
            demand,
            found,
            profile_name=str(profile),
            packer=packer,
            num_gpus=gpus,
            judge=judge,
            report=lambda num_asked: report("trying GPUs", 0.0),
        )
    if judge is not None and (outside := judge.outside_range()):
        _warn(f"the surrogate was asked beyond what it was trained on: {'; '.join(outside)}")
    checked = _checked(plan, profile, seeds=(0,))

    def draw(path: Path) -> None:
        from loraplex.cli.plan_plot import draw_plan

        save_picture(path, draw_plan(plan))

    with files_saved(
        (out, lambda path: write_plan(path, plan)),
        (json_out, lambda path: save_json(path, _figures(checked))),
        (plot, draw),
    ):
        _show(plan, checked)


@app.command()
def show(plan: PlanPath) -> None:
    """Print which GPU serves which adapters."""
    from loraplex.planner.plan_file import read_plan

    _show(read_plan(plan), None)


@app.command()
def check(
    plan: PlanPath,
    profile: Annotated[
        Path | None, typer.Option(metavar="NAME|PATH", help="Default: what the plan was made with.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the requests, which must not be 0.")] = "1,2,3,4,5",
    seconds: Annotated[float, typer.Option(min=1, help="Simulated seconds of each run.")] = 1800.0,
    json_out: JsonPath = None,
) -> None:
    """Simulate a plan on traffic that it was not made with. The exit status is 1 if a GPU starves: serves
    less than 0.9 of the tokens that are offered."""
    check_writable(json_out, inputs=(plan,))
    _check_finite(seconds=seconds)
    from loraplex.planner.plan_file import read_plan

    read = read_plan(plan)
    checked = _checked(read, profile or Path(read.profile), seeds=_seeds_of(seeds), seconds=seconds)
    with files_saved((json_out, lambda path: save_json(path, _figures(checked)))):
        _show(read, checked)
    if checked.starves:
        raise typer.Exit(_STARVES)


def _judge_of(path: Path, profile: Profile, demand: Demand) -> SurrogateJudge:
    from loraplex.perf.slot_profile import SlotProfile
    from loraplex.planner.surrogate import SurrogateJudge
    from loraplex.planner.surrogate_json import read_surrogate

    if not isinstance(profile, SlotProfile):
        raise UserError(
            "surrogates are of engines with slots, and the profile is of one without; leave --surrogate out"
        )
    return SurrogateJudge(
        read_surrogate(path, profile),
        profile,
        prompt_tokens=demand.prompt_tokens,
        output_tokens=demand.output_tokens,
    )


def _check_finite(**options: float | None) -> None:
    """Raise a usage error for a number that is none, or has no end."""
    for name, value in options.items():
        if value is not None and not math.isfinite(value):
            raise typer.BadParameter(
                f"{value} is not a finite number", param_hint=f"--{name.replace('_', '-')}"
            )


def _demand(
    workload: Path | None, adapters: Path | None, prompt_tokens: float | None, output_tokens: float | None
) -> Demand:
    from loraplex.planner.adapter_table import read_table, read_workload_demand

    _check_finite(prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    if (workload is None) == (adapters is None):
        raise UserError("say what is to be served: give --workload FILE or --adapters FILE, one of them")
    if workload is not None:
        if prompt_tokens is not None or output_tokens is not None:
            raise UserError("--workload shows how long requests are; leave --prompt-tokens and the like out")
        return read_workload_demand(workload)
    assert adapters is not None
    if prompt_tokens is None or output_tokens is None:
        raise UserError("a table says nothing of lengths; give --prompt-tokens and --output-tokens")
    return read_table(adapters, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def _seeds_of(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} are no seeds; give whole numbers, such as 1,2,3") from None
    if 0 in seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise typer.BadParameter("give different whole numbers above 0: plans are made with seed 0")
    return seeds


def _checked(plan: Plan, profile: Path, *, seeds: tuple[int, ...], seconds: float | None = None) -> PlanCheck:
    from loraplex.planner.check import CHECKED_S, check_plan

    found = read_profile_of(profile, None)
    with shown_progress("simulating the plan") as report:
        return check_plan(
            plan,
            found,
            seeds=seeds,
            duration_s=seconds or CHECKED_S,
            report=lambda share: report("GPUs", share),
        )


def _show(plan: Plan, checked: PlanCheck | None) -> None:
    rows: list[dict[str, Any]] = []
    for number, gpu in enumerate(plan.gpus):
        row: dict[str, Any] = {
            "gpu": number,
            "adapters": len(gpu.adapters),
            "slots": gpu.num_slots,
            "rank": gpu.max_rank,
            "req_s": f"{sum(each.rate_rps for each in gpu.adapters):.2f}",
        }
        rows.append(row if checked is None else {**row, **_row_of(checked.gpus[number])})
    columns = [
        number_column("gpu", heading="GPU"),
        *(number_column(key, heading=heading) for key, heading in _COUNTS.items()),
        *(Column(key=key, heading=heading, kind=str, show=str) for key, heading in _FIGURES.items()),
    ]
    print_table(rows, columns)
    num_adapters = sum(len(gpu.adapters) for gpu in plan.gpus)
    typer.echo(
        f"{num_adapters:,} {plural('adapter', num_adapters)} on {len(plan.gpus):,} "
        f"{plural('GPU', len(plan.gpus))}, packed by {plan.packer} for {plan.profile}"
    )
    if checked is not None and checked.starves:
        starved = {number: gpu for number, gpu in enumerate(checked.gpus) if gpu.num_starved}
        too_large = [str(number) for number, gpu in starved.items() if not gpu.fits]
        slow = [str(number) for number, gpu in starved.items() if gpu.fits]
        if too_large:
            _warn(
                f"GPU {', '.join(too_large)}: so many slots leave no memory for requests; plan with another "
                "--packer"
            )
        if slow:
            _warn(
                f"starving: GPU {', '.join(slow)} serves less than 0.9 of what is offered; plan with more "
                "--gpus, or with lower rates"
            )


def _rules_of(surrogate: Surrogate) -> str:
    from loraplex.planner.rules import rules_text
    from loraplex.planner.trees import tree_of

    parts = []
    for what, forest in (("tokens/s at most", surrogate.throughput), ("starves", surrogate.starvation)):
        if forest is None:
            parts += [what, "if it serves less than 0.9 of what is offered", ""]
        else:
            parts += [what, *rules_text(tree_of(forest), surrogate.feature_names), ""]
    return "\n".join(parts)


def _show_accuracy(surrogate: Surrogate) -> None:
    accuracy = surrogate.accuracy
    typer.echo(
        f"on {accuracy['num_held_out']:,.0f} runs that it was not trained on: throughput "
        f"{accuracy['throughput_smape_authors_unit']:.2f}% off (the paper's SMAPE, half of ours), starvation "
        f"macro-F1 {accuracy['starvation_macro_f1']:.3f}"
    )


def _warn(message: str) -> None:
    typer.secho(message, fg=typer.colors.RED)


def _row_of(gpu: GpuCheck) -> dict[str, Any]:
    def shown(figure: str, form: Callable[[float], str]) -> str | None:
        mean = gpu.mean(figure)
        return None if mean is None else form(mean)

    return {
        "served": f"{gpu.share_served:.0%}",
        "tok_s": shown("served_tok_s", "{:,.0f}".format),
        "ttft": shown("ttft_s", lambda each: f"{each * 1e3:.0f}"),
        "itl": shown("itl_s", lambda each: f"{each * 1e3:.1f}"),
        "starved": f"{gpu.num_starved} of {len(gpu.runs)}",
    }


def _figures(checked: PlanCheck) -> dict[str, Any]:
    return {
        "starves": checked.starves,
        "seeds": list(checked.seeds),
        "duration_s": checked.duration_s,
        "gpus": [
            {
                "adapters": len(each.gpu.adapters),
                "num_slots": each.gpu.num_slots,
                "runs": [asdict(run) for run in each.runs],
            }
            for each in checked.gpus
        ],
    }


_COUNTS: Final = {"adapters": "adapters", "slots": "slots", "rank": "largest rank"}
_FIGURES: Final = {
    "req_s": "req/s",
    "served": "served",
    "tok_s": "tok/s",
    "ttft": "TTFT ms",
    "itl": "ITL ms",
    "starved": "seeds starved",
}
