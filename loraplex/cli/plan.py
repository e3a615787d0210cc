"""`loraplex plan`: how many GPUs, and which adapter where.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraplex.cli import plan_apply
from loraplex.cli import plan_options as option
from loraplex.cli.durations import Duration, duration_option, parse_duration
from loraplex.cli.flags import App
from loraplex.cli.json_out import (
    check_picture,
    check_writable,
    files_saved,
    save_json,
    save_picture,
    save_text,
)
from loraplex.cli.plan_demand import asked_demand, check_finite
from loraplex.cli.plan_profile import PlanProfile, profile_of_plan
from loraplex.cli.plan_show import figures_of, show_adapters, show_alternatives, show_plan, warn
from loraplex.cli.plan_train import train
from loraplex.cli.plan_watch import watch
from loraplex.cli.server_calls import ApiKey
from loraplex.cli.twin_options import JsonPath, ProfilePath, read_profile_of
from loraplex.core.progress import shown_progress
from loraplex.core.words import unknown_name

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.planner.alternatives import Alternative
    from loraplex.planner.check import PlanCheck
    from loraplex.planner.demand import Demand
    from loraplex.planner.objectives import Objective
    from loraplex.planner.plan import Plan
    from loraplex.planner.surrogate import SurrogateJudge

app = App(
    help="How many GPUs, and which adapter where: made, checked, shown and applied.", no_args_is_help=True
)
app.command()(train)

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A file of `loraplex plan make`.")]
_MADE_SEEDS: Final = (1, 2, 3)
"""Seeds that a new plan is simulated with, for its error bars: packers judge by seed 0."""
_DOES_NOT_HOLD: Final = 1
"""Exit status for a plan with a GPU that starves or misses a limit."""


@app.command()
def make(
    profile: ProfilePath,
    out: option.Out = None,
    workload: option.WorkloadFile = None,
    adapters: option.AdapterTable = None,
    from_url: option.FromUrl = None,
    api_key: ApiKey = None,
    mean_prompt_tokens: option.MeanPromptTokens = None,
    mean_output_tokens: option.MeanOutputTokens = None,
    gpus: option.Gpus = None,
    surrogate: option.SurrogateFile = None,
    packer: option.Packer = "max-pack",
    slo_ttft: option.SloTtft = None,
    slo_itl: option.SloItl = None,
    headroom: option.Headroom = None,
    compare: option.Compare = None,
    json_out: JsonPath = None,
    plot: option.Plot = None,
) -> None:
    """Plan which GPU serves which adapters, with how many slots, judged by the twin or a surrogate. The exit
    status is 1 if a GPU of the plan starves all the same, or misses a limit."""
    inputs = tuple(path for path in (profile, workload, adapters, surrogate) if path is not None)
    check_writable(out, "--out", inputs=inputs)
    taken = inputs if out is None else (*inputs, out)
    check_writable(json_out, inputs=taken)
    check_picture(plot, inputs=taken)
    check_finite(headroom=headroom)
    objective = _objective_of(slo_ttft, slo_itl)
    _check_packing(packer, surrogate, objective)
    found = read_profile_of(profile, None)
    demand = asked_demand(
        workload,
        adapters,
        mean_prompt_tokens,
        mean_output_tokens,
        from_url=from_url,
        api_key=api_key,
        profile=found,
    )
    plan = _made(
        demand,
        found,
        profile_name=str(profile),
        packer=packer,
        num_gpus=gpus,
        judge=None if surrogate is None else _judge_of(surrogate, found, demand),
        objective=objective,
        headroom=headroom,
    )
    checked = _checked(plan, found, seeds=_MADE_SEEDS)
    others = _alternatives(plan, found) if _is_compared(compare, plan) else []
    _save_and_show(plan, checked, others, found, out=out, json_out=json_out, plot=plot)
    if not checked.holds:
        raise typer.Exit(_DOES_NOT_HOLD)


@app.command()
def show(
    plan: PlanPath,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="Also each adapter, with its GPUs, its rank and its rate.")
    ] = False,
) -> None:
    """Print the GPUs of a plan, and with --adapters which of them serves which adapter."""
    from loraplex.planner.plan_file import read_plan

    read = read_plan(plan)
    show_plan(read)
    if adapters:
        show_adapters(read)


@app.command()
def check(
    plan: PlanPath,
    profile: PlanProfile = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the requests, which must not be 0.")] = "1,2,3,4,5",
    seconds: Annotated[
        Duration, duration_option("--seconds", least=1, text="The simulated time of each run.")
    ] = Duration(1800),
    json_out: JsonPath = None,
) -> None:
    """Simulate a plan on traffic that it was not made with. The exit status is 1 if a GPU starves: serves
    less than 0.9 of the tokens that are offered, or misses a limit that the plan was made for."""
    check_writable(json_out, inputs=(plan,))
    from loraplex.planner.plan_file import read_plan

    read = read_plan(plan)
    found = profile_of_plan(read, profile)
    checked = _checked(read, found, seeds=_seeds_of(seeds), seconds=float(seconds))
    with files_saved((json_out, lambda path: save_json(path, figures_of(checked, found)))):
        show_plan(read, checked, found)
    if not checked.holds:
        raise typer.Exit(_DOES_NOT_HOLD)


def _check_packing(packer: str, surrogate: Path | None, objective: Objective) -> None:
    """Raise a usage error for an unknown packer, or for limits that a surrogate cannot judge."""
    from loraplex.planner.make import PACKERS

    if packer not in PACKERS:
        raise typer.BadParameter(unknown_name("packer", packer, PACKERS), param_hint="--packer")
    if surrogate is not None and objective.has_limits:
        raise typer.BadParameter(
            "a surrogate knows throughput and starvation, but neither TTFT nor ITL; leave it out, and the "
            "twin judges, or leave --slo-ttft and --slo-itl out",
            param_hint="--surrogate",
        )


def _made(
    demand: Demand,
    profile: Profile,
    *,
    profile_name: str,
    packer: str,
    num_gpus: int | None,
    judge: SurrogateJudge | None,
    objective: Objective,
    headroom: float | None,
) -> Plan:
    """Return the plan, and warn if the surrogate was asked beyond what it knows."""
    from loraplex.planner.make import make_plan

    with shown_progress("planning") as report:
        plan = make_plan(
            demand,
            profile,
            profile_name=profile_name,
            packer=packer,
            num_gpus=num_gpus,
            judge=judge,
            objective=objective,
            headroom=headroom,
            report=lambda share: report("placing adapters", share),
        )
    if judge is not None and (outside := judge.outside_range()):
        warn(
            f"the surrogate was asked beyond what it was trained on: {'; '.join(outside)}; it answered for "
            "the nearest that it knows: leave --surrogate out, and the twin judges"
        )
    return plan


def _save_and_show(
    plan: Plan,
    checked: PlanCheck,
    others: list[Alternative],
    profile: Profile,
    *,
    out: Path | None,
    json_out: Path | None,
    plot: Path | None,
) -> None:
    from loraplex.planner.plan_file import plan_to_json

    def draw(path: Path) -> None:
        from loraplex.cli.plan_plot import draw_plan

        save_picture(path, draw_plan(plan, checked))

    with files_saved(
        (out, lambda path: save_text(path, plan_to_json(plan))),
        (json_out, lambda path: save_json(path, figures_of(checked, profile, others))),
        (plot, draw),
    ):
        show_plan(plan, checked, profile)
        if others:
            show_alternatives(checked, others)
        if out is None:
            typer.echo("no file was written; --out PLAN.json writes the plan, for `check` and `apply`")


def _objective_of(slo_ttft: str | None, slo_itl: str | None) -> Objective:
    from loraplex.planner.objectives import Objective

    return Objective(
        ttft_s=None if slo_ttft is None else parse_duration(slo_ttft, "--slo-ttft"),
        itl_s=None if slo_itl is None else parse_duration(slo_itl, "--slo-itl"),
    )


def _judge_of(path: Path, profile: Profile, demand: Demand) -> SurrogateJudge:
    from loraplex.perf.slot_profile import SlotProfile
    from loraplex.planner.surrogate import SurrogateJudge
    from loraplex.planner.surrogate_json import read_surrogate

    if not isinstance(profile, SlotProfile):
        raise typer.BadParameter(
            "surrogates are of engines with slots, and the profile is of one without; leave it out",
            param_hint="--surrogate",
        )
    return SurrogateJudge(
        read_surrogate(path, profile),
        profile,
        prompt_tokens=demand.prompt_tokens,
        output_tokens=demand.output_tokens,
    )


def _seeds_of(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} are no seeds; give whole numbers, such as 1,2,3", param_hint="--seeds"
        ) from None
    if 0 in seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise typer.BadParameter(
            "give different whole numbers above 0: plans are made with seed 0", param_hint="--seeds"
        )
    return seeds


def _checked(
    plan: Plan, profile: Profile, *, seeds: tuple[int, ...], seconds: float | None = None
) -> PlanCheck:
    from loraplex.planner.check import check_plan

    with shown_progress("simulating the plan") as report:
        return check_plan(
            plan,
            profile,
            seeds=seeds,
            duration_s=seconds,
            with_most=True,
            report=lambda share: report("GPUs", share),
        )


def _is_compared(asked: bool | None, plan: Plan) -> bool:
    return len(plan.gpus) <= option.COMPARED_GPUS if asked is None else asked


def _alternatives(plan: Plan, profile: Profile) -> list[Alternative]:
    from loraplex.planner.alternatives import alternatives

    with shown_progress("comparing") as report:
        return list(alternatives(plan, profile, report))


app.command()(plan_apply.apply)
app.command()(plan_apply.release)
app.command()(watch)
