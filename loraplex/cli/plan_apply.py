"""`loraplex plan apply` and `release`: from a plan to the engines that serve it.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraplex.cli.durations import Duration, duration_option
from loraplex.cli.engine_of_plan import warn_of_other_engine
from loraplex.cli.measured_demand import engine_at
from loraplex.cli.placement_calls import body_of, give, placement_at
from loraplex.cli.placement_calls import release as release_placement
from loraplex.cli.plan_profile import PlanProfile, profile_of_plan
from loraplex.cli.plan_show import unit_of
from loraplex.cli.server_calls import DEFAULT_URL, ApiKey, BaseUrl
from loraplex.cli.table import number_column, print_table, text_column
from loraplex.core.errors import UserError
from loraplex.core.progress import in_words, shown_progress
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.planner.check import PlanCheck
    from loraplex.planner.move_cost import MoveCost
    from loraplex.planner.placement_steps import Step
    from loraplex.planner.plan import Plan
    from loraplex.server.responses import PlacedAdapterInfo, Placement

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A file of `loraplex plan make`.")]
_ADAPTERS_DIR: Final = "adapters"
_POLL_S: Final = 0.2
_POLL_ADAPTER_S: Final = 5e-4
"""Seconds between looks, and how many more for each adapter: a fleet has to list all of them each time."""
_AGAIN_S: Final = 10.0
"""Seconds after which a placement that does not get on is handed over again: loads that failed are tried
again then."""
_MAX_ROWS: Final = 20
_MAX_NAMED: Final = 5
_COLUMNS: Final = (
    text_column("adapter"),
    number_column("rank"),
    text_column("loaded_by"),
    text_column("let_go_by"),
)


def apply(
    plan: PlanPath,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    profile: PlanProfile = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, show the steps, and change nothing.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Do not simulate the plan before; it may starve.")
    ] = False,
    timeout: Annotated[
        Duration, duration_option(most=86400, text="How long to wait until the fleet has carried it out.")
    ] = Duration(600),
    vllm_commands: Annotated[
        bool,
        typer.Option(
            "--vllm-commands", help="Call no fleet: print the commands that start vLLM so, one for each GPU."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="The base model in these commands; default: the model of the profile."),
    ] = None,
    adapters_dir: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where vLLM finds a subfolder for each adapter: ./adapters."),
    ] = None,
    gpus_per_machine: Annotated[
        int | None,
        typer.Option(min=1, help="GPUs that each machine has for these commands; default: all of the plan."),
    ] = None,
) -> None:
    """Have a running fleet serve as planned; its first replica is the plan's first GPU, and so on.

    The plan is simulated before, and refused if a GPU starves or misses a limit. An adapter's old replicas
    serve it until the new ones have it. Repeated, the command goes on.
    """
    from loraplex.planner.plan_file import read_plan

    read = read_plan(plan)
    if vllm_commands:
        if dry_run:
            raise typer.BadParameter("--vllm-commands changes nothing; leave it out", param_hint="--dry-run")
        found = profile_of_plan(read, profile)
        commands = _commands(read, found, model, adapters_dir, gpus_per_machine)
        if not force:
            check_serves(read, found)
        typer.echo("\n\n".join(commands))
        _explain(read, found, model)
        return
    if model is not None or adapters_dir is not None or gpus_per_machine is not None:
        raise typer.BadParameter(
            "--model, --adapters-dir and --gpus-per-machine are for --vllm-commands; leave them out"
        )
    known = _profile_if_needed(read, profile, is_needed=not force)
    present = placement_at(base_url, api_key)
    body = body_of(read, present.replicas, plan.name)
    present = give(base_url, api_key, body, dry_run=True)
    steps = steps_to(read, present)
    show_steps(present, steps, known)
    if known is not None:
        warn_of_other_engine(known, engine_at(base_url, api_key), base_url)
    if known is not None and not force:
        check_serves(read, known)
    if dry_run:
        typer.echo("nothing was changed")
        return
    given = give(base_url, api_key, body)
    _wait(given, timeout, lambda: placement_at(base_url, api_key), lambda: give(base_url, api_key, body))
    number = len(given.replicas)
    typer.echo(
        f"the plan is carried out on {number} {plural('replica', number)}; `loraplex plan release` lets the "
        "fleet place its adapters by itself again"
    )


def release(base_url: BaseUrl = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Let a running fleet place its adapters by its own policy again."""
    before = placement_at(base_url, api_key)
    release_placement(base_url, api_key)
    if before.is_given:
        typer.echo("the fleet places its adapters by its own policy again")
    elif before.plan is not None:
        typer.echo("the plan, which was not in force since the fleet was started, is forgotten")
    else:
        typer.echo("the fleet was given no plan, and places its adapters by its own policy")


def steps_to(plan: Plan, present: Placement) -> list[Step]:
    """Return the steps by which a fleet gets to a plan for as many GPUs as it has replicas."""
    from loraplex.planner.placement_steps import holders_of, placement_of, steps_between

    # A fleet without a placement may have an adapter on any replica, or on none.
    now = {each.name: frozenset(each.replicas or ()) for each in present.data}
    wanted = {
        name: frozenset(present.replicas[gpu] for gpu in gpus)
        for name, gpus in holders_of(placement_of(plan)).items()
    }
    return steps_between(now, wanted)


def _profile_if_needed(plan: Plan, given: Path | None, *, is_needed: bool) -> Profile | None:
    """Read the profile of a plan. If it is not needed and not given, say that it cannot be read instead of
    raising."""
    try:
        return profile_of_plan(plan, given)
    except UserError as error:
        if is_needed or given is not None:
            raise
        typer.echo(f"what the steps take is not known: {error}", err=True)
        return None


def cost_of(present: Placement, steps: list[Step], profile: Profile) -> MoveCost:
    """Return the price of steps by this profile."""
    from loraplex.planner.move_cost import AdapterSize, move_cost

    sizes = {each.name: AdapterSize(rank=each.rank, num_bytes=each.bytes) for each in present.data}
    return move_cost(steps, sizes, profile)


def show_steps(present: Placement, steps: list[Step], profile: Profile | None) -> None:
    """Print which adapters move where, and the price of that if there is a profile."""
    ranks = {each.name: each.rank for each in present.data}
    largest = sorted(steps, key=lambda step: (-len(step.loads), -ranks[step.adapter], step.adapter))
    rows = [
        {
            "adapter": step.adapter,
            "rank": ranks[step.adapter],
            "loaded_by": _replicas(step.loads),
            "let_go_by": _replicas(step.lets_go),
        }
        for step in largest[:_MAX_ROWS]
    ]
    if rows:
        print_table(rows, _COLUMNS)
    if len(steps) > _MAX_ROWS:
        typer.echo(f"and {len(steps) - _MAX_ROWS:,} more")
    if not steps:
        typer.echo("every adapter is on the replicas of the plan already")
        return
    if profile is None:
        return
    cost = cost_of(present, steps, profile)
    typer.echo(
        f"{cost.num_moved:,} {plural('adapter', cost.num_moved)} to move: {cost.num_loads:,} "
        f"{plural('load', cost.num_loads)} of {cost.num_bytes / 2**20:,.1f} MiB in all, which take the "
        f"replica with most of them {cost.longest_s:.2f} s"
    )


def _replicas(numbers: frozenset[int]) -> str | None:
    return ", ".join(map(str, sorted(numbers))) or None


def check_serves(plan: Plan, profile: Profile) -> None:
    """Simulate a plan on traffic that it was not made with. Raises UserError if a GPU starves, or misses a
    limit of the plan."""
    from loraplex.planner.check import CHECKED_S, SEEDS, check_plan

    with shown_progress("simulating the plan") as report:
        checked = check_plan(
            plan,
            profile,
            seeds=SEEDS,
            duration_s=CHECKED_S,
            report=lambda share: report("GPUs", share),
        )
    if not checked.holds:
        failing = _failing(checked, unit_of(plan, profile))
        raise UserError(
            f"the plan does not hold in the twin: {failing}; make another (`loraplex plan check PLAN` shows "
            "more), or apply it as it is with --force"
        )


def _failing(checked: PlanCheck, unit: str) -> str:
    named = []
    for number, gpu in enumerate(checked.gpus):
        if not gpu.fits:
            named.append(f"{unit} {number} has no memory for so many slots")
        elif gpu.num_starved:
            named.append(f"{unit} {number} starves and serves {gpu.share_served:.0%} of what is offered")
        elif gpu.missed:
            named.append(f"{unit} {number} has a {' and a '.join(gpu.missed)}")
    return _some(named)


def _wait(
    given: Placement, timeout_s: float, look: Callable[[], Placement], again: Callable[[], Placement]
) -> None:
    """Wait until a fleet has carried out what it was given."""
    wanted = {each.name: each.given for each in given.data if each.given is not None}
    started_s = looked_s = time.monotonic()
    with shown_progress("moving adapters") as report:
        while not given.stands:
            missing = [each for each in given.data if each.given is not None and each.replicas != each.given]
            report(f"{len(missing):,} to go", 1 - len(missing) / max(len(wanted), 1))
            now_s = time.monotonic()
            if now_s - started_s >= timeout_s:
                raise UserError(
                    f"after {in_words(timeout_s)} the fleet has not carried out the plan: {_left(missing)}; "
                    "it goes on by itself: give the same command again to wait for it, or let its policy "
                    "place them with `loraplex plan release` (`loraplex fleet status` shows the replicas)"
                )
            time.sleep(_POLL_S + _POLL_ADAPTER_S * len(given.data))
            is_stuck = not any(each.waiting for each in given.data)
            if is_stuck and now_s - looked_s >= _AGAIN_S:
                looked_s = now_s
                given = again()
            else:
                given = look()
            # Adapters may be loaded and unloaded meanwhile.
            is_same = all(wanted.get(each.name, each.given) == each.given for each in given.data)
            if not given.is_given or not is_same:
                raise UserError(
                    "the fleet was given another placement meanwhile, and this one was not carried out; "
                    "`loraplex plan apply` gives it again"
                )


def _left(missing: list[PlacedAdapterInfo]) -> str:
    return _some(
        [
            f"{each.name!r} waits until it is loaded by {_numbers(each.waiting)}"
            if each.waiting
            else f"{each.name!r} is on {_numbers(each.replicas or [])}, not on {_numbers(each.given or [])}"
            for each in missing
        ]
    )


def _numbers(replicas: list[int]) -> str:
    return f"{plural('replica', len(replicas))} {', '.join(map(str, replicas))}"


def _some(named: list[str]) -> str:
    """Return the first of them as text, with how many more there are."""
    left = len(named) - _MAX_NAMED
    return ", ".join(named[:_MAX_NAMED]) + (f" and {left:,} more" if left > 0 else "")


def _commands(
    plan: Plan, profile: Profile, model: str | None, adapters_dir: str | None, gpus_per_machine: int | None
) -> list[str]:
    from loraplex.perf.named_profiles import model_of
    from loraplex.planner.vllm_commands import vllm_commands

    return vllm_commands(
        plan,
        profile,
        model=model or model_of(profile),
        adapters_dir=adapters_dir or _ADAPTERS_DIR,
        gpus_per_machine=gpus_per_machine,
    )


def _explain(plan: Plan, profile: Profile, model: str | None) -> None:
    """Say what the commands leave open."""
    from loraplex.perf.named_profiles import model_of

    if model is None:
        named = model_of(profile)
        typer.echo(f"the profile calls the model {named!r}; give your checkpoint with --model", err=True)
    for number, gpu in enumerate(plan.gpus):
        if not gpu.adapters:
            typer.echo(f"GPU {number} has no adapters in the plan, and gets no command", err=True)
