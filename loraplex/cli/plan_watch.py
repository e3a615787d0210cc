"""`loraplex plan watch`: looks at a fleet from time to time, and proposes another plan when its traffic has
left what was planned for.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli.durations import Duration, duration_option
from loraplex.cli.engine_of_plan import warn_of_other_engine
from loraplex.cli.json_out import check_writable, files_saved, save_json, save_text
from loraplex.cli.measured_demand import measured_demand
from loraplex.cli.placement_calls import check_num_gpus, placement_at
from loraplex.cli.plan_apply import PlanPath
from loraplex.cli.plan_profile import PlanProfile, profile_of_plan
from loraplex.cli.server_calls import DEFAULT_URL, ApiKey, BaseUrl
from loraplex.cli.twin_options import JsonPath
from loraplex.core.errors import LoraplexError
from loraplex.core.progress import in_words, shown_progress
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.planner.demand import Demand
    from loraplex.planner.move_cost import MoveCost
    from loraplex.planner.plan import Plan
    from loraplex.planner.watch import Hysteresis, Look
    from loraplex.server.responses import Placement

_PROPOSED: Final = 4
"""Exit status of `watch --once` if it proposes another plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposal:
    """Another plan. `cost`: of moving there; `gained_tok_s`: tokens per second that it serves and the present
    placement does not; `least_served`: share of its requests' tokens that the worst GPU serves by it."""

    plan: Plan
    cost: MoveCost
    gained_tok_s: float
    least_served: float


def watch(
    plan: PlanPath,
    base_url: BaseUrl = DEFAULT_URL,
    api_key: ApiKey = None,
    profile: PlanProfile = None,
    every: Annotated[
        Duration, duration_option(least=1, most=86400, text="The time between looks at what was asked for.")
    ] = Duration(300),
    once: Annotated[
        bool, typer.Option("--once", help="Look once; the exit status is 4 if another plan is proposed.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the proposed plan to this file.")] = None,
    json_out: JsonPath = None,
) -> None:
    """Watch a fleet that serves by a plan, and propose another one when its traffic has left the plan.

    That is when a GPU starves or misses a limit in the twin, or when fewer GPUs would do. Says what moving
    costs and gains, and applies nothing.
    """
    check_writable(out, "--out", inputs=(plan,))
    check_writable(json_out, inputs=tuple(path for path in (plan, out) if path is not None))
    from loraplex.planner.plan_file import read_plan
    from loraplex.planner.watch import NUM_LOOKS, Hysteresis

    read = read_plan(plan)
    found = profile_of_plan(read, profile)
    if profile is not None:  # which the plans that are proposed are made with
        read = replace(read, profile=str(profile))
    hysteresis = Hysteresis(1 if once else NUM_LOOKS)
    said: set[str] = set()
    while True:
        try:
            is_proposed = _look_once(read, found, base_url, api_key, hysteresis, said, out, json_out)
        except LoraplexError as error:
            if once:
                raise
            typer.echo(f"{_now()} {error}; looking again in {in_words(every)}", err=True)
        else:
            if once:
                raise typer.Exit(_PROPOSED if is_proposed else 0)
        time.sleep(every)


def _look_once(
    plan: Plan,
    profile: Profile,
    base_url: str,
    api_key: str | None,
    hysteresis: Hysteresis,
    said: set[str],
    out: Path | None,
    json_out: Path | None,
) -> bool:
    """Look at the fleet, and print and write what was found; return whether another plan is proposed. `said`:
    how its engines were found not to be those of the profile, which is said once."""
    from loraplex.planner.plan_file import plan_to_json
    from loraplex.planner.watch import look_at, served_now

    present = placement_at(base_url, api_key)
    check_num_gpus(plan, present.replicas)
    measured = measured_demand(base_url, api_key, profile)
    if not said and (words := warn_of_other_engine(profile, measured.engine, base_url)) is not None:
        said.add(words)
    demand = _served(measured.demand, present)
    served = served_now(plan, demand, _shares(plan, present))
    with shown_progress("looking at the fleet") as report:
        look = look_at(
            plan,
            served,
            profile,
            report=lambda share: report("simulating", share),
            is_rough=measured.is_rough,
        )
    _show_look(look, present)
    proposal = None
    is_due = hysteresis.is_due(look.verdict, look.measured_tok_s)
    if is_due:
        proposal = _proposal(plan, look, demand, present, profile)
        _show_proposal(plan, look, proposal)
    with files_saved(
        (out if proposal else None, lambda path: save_text(path, plan_to_json(_plan_of(proposal)))),
        (json_out, lambda path: save_json(path, _figures(look, proposal))),
    ) as written:
        is_handed_over = proposal is None or out is None or out in written
        if is_due and is_handed_over:  # otherwise it is proposed again at the next look
            hysteresis.acted(look.measured_tok_s)
        if proposal is not None and is_handed_over:
            _show_advice(proposal, len(plan.gpus), out, base_url)
    return proposal is not None


def _plan_of(proposal: _Proposal | None) -> Plan:
    assert proposal is not None, "only a proposal is written"
    return proposal.plan


def _served(demand: Demand, present: Placement) -> Demand:
    """Return the demand for the adapters that the fleet places: others came or went between two calls."""
    names = {each.name for each in present.data}
    return replace(demand, adapters=tuple(each for each in demand.adapters if each.name in names))


def _shares(plan: Plan, present: Placement) -> list[dict[str, float]]:
    """Return the share of each adapter's requests that each GPU gets: as planned where it is where the plan
    has it, and equal ones otherwise."""
    from loraplex.fleet.plan import Entry
    from loraplex.planner.placement_steps import placement_of
    from loraplex.planner.watch import shares_by_gpu

    planned = placement_of(plan)
    gpu_of = {replica: gpu for gpu, replica in enumerate(present.replicas)}
    entries = {}
    for each in present.data:
        gpus = [gpu_of[replica] for replica in each.replicas or present.replicas if replica in gpu_of]
        entry = planned.get(each.name)
        if entry is None or entry.replicas != tuple(gpus):
            entry = Entry.of_weights(dict.fromkeys(gpus or range(len(gpu_of)), 1.0))
        entries[each.name] = entry
    return shares_by_gpu(entries, len(plan.gpus))


def _proposal(
    plan: Plan, look: Look, demand: Demand, present: Placement, profile: Profile
) -> _Proposal | None:
    """Return another plan that suits what was measured; None if there is none with fewer GPUs."""
    from loraplex.planner.check import check_plan
    from loraplex.planner.move_cost import AdapterSize, move_cost
    from loraplex.planner.placement_steps import holders_of, placement_of, steps_between
    from loraplex.planner.watch import (
        LOOKED_S,
        SEEDS,
        least_served,
        lost_tok_s,
        plan_again,
        served_now,
        shares_by_gpu,
        with_least_moves,
    )

    with shown_progress("planning again", left=None) as report:
        report("trying GPUs", None)
        found = plan_again(plan, look, demand, profile)
        if found is None:
            return None
        sizes = {each.name: AdapterSize(rank=each.rank, num_bytes=each.bytes) for each in present.data}
        gpu_of = {replica: gpu for gpu, replica in enumerate(present.replicas)}
        now = {
            each.name: frozenset(gpu_of[replica] for replica in each.replicas or () if replica in gpu_of)
            for each in present.data
        }
        found = with_least_moves(found, now, sizes)
        by_it = served_now(found, demand, shares_by_gpu(placement_of(found), len(found.gpus)))
        report("simulating the plan", None)
        checked = check_plan(by_it, profile, seeds=SEEDS, duration_s=LOOKED_S)
    lost_now = 0.0 if look.checked is None else lost_tok_s(look.checked)
    return _Proposal(
        plan=found,
        cost=move_cost(steps_between(now, holders_of(placement_of(found))), sizes, profile),
        gained_tok_s=lost_now - lost_tok_s(checked),
        least_served=least_served(checked),
    )


def _show_look(look: Look, present: Placement) -> None:
    from loraplex.planner.watch import Finding

    asked = (
        f"asked for {look.measured_tok_s:,.0f} tokens/s, planned for {look.planned_tok_s:,.0f} "
        f"on {len(look.served.gpus)} {plural('GPU', len(look.served.gpus))}"
    )
    match look.verdict:
        case Finding.HOLDS:
            found = "the plan holds"
        case Finding.TOO_SMALL:
            limits = " or miss a limit" if look.served.objective.has_limits else ""
            number = look.num_failing
            found = f"{number} of {len(look.served.gpus)} GPUs starve{limits} in the twin"
        case Finding.TOO_LARGE:
            found = "fewer GPUs may do"
    typer.echo(f"{_now()} {found}: {asked}")
    if not present.is_given:
        typer.echo("the fleet was given no plan, and is judged by where its policy has the adapters")


def _show_proposal(plan: Plan, look: Look, proposal: _Proposal | None) -> None:
    from loraplex.planner.watch import HEADROOM, Finding

    if proposal is None:
        number = len(plan.gpus)
        typer.echo(f"{number} {plural('GPU', number)} are needed for {HEADROOM:g} times that, as now")
        return
    cost, num_gpus = proposal.cost, len(proposal.plan.gpus)
    before = "as many as now" if num_gpus == len(plan.gpus) else f"instead of {len(plan.gpus)}"
    typer.echo(
        f"proposed: {num_gpus} {plural('GPU', num_gpus)}, {before}, planned for {HEADROOM:g} times these "
        f"rates; the worst serves {proposal.least_served:.0%} of what is asked for now"
    )
    typer.echo(
        f"it costs: {cost.num_moved:,} {plural('adapter', cost.num_moved)} to move, {cost.num_loads:,} "
        f"{plural('load', cost.num_loads)} of {cost.num_bytes / 2**20:,.1f} MiB, {cost.longest_s:.2f} s on "
        "the replica with most of them"
    )
    if look.verdict is Finding.TOO_SMALL:
        gained = proposal.gained_tok_s
        per_gpu_tok_s = look.measured_tok_s / len(plan.gpus)
        worth = f", which outweighs the loads after {in_words(cost.load_s * per_gpu_tok_s / gained)}"
        typer.echo(f"it gains: {gained:,.0f} tokens/s that are not served now{worth if gained > 0 else ''}")
    else:
        saved = len(plan.gpus) - num_gpus
        typer.echo(f"it gains: {saved} {plural('GPU', saved)}")


def _show_advice(proposal: _Proposal, num_gpus: int, out: Path | None, base_url: str) -> None:
    if out is None:
        typer.echo("give --out FILE to have it written, for `loraplex plan apply`")
        return
    num_wanted = len(proposal.plan.gpus)
    scaled = f"`loraplex fleet scale {num_wanted} --url {base_url}` and " if num_wanted != num_gpus else ""
    typer.echo(f"carry it out with {scaled}`loraplex plan apply {out} --url {base_url}`")


def _figures(look: Look, proposal: _Proposal | None) -> dict[str, Any]:
    return {
        "verdict": look.verdict.value,
        "measured_tok_s": look.measured_tok_s,
        "planned_tok_s": look.planned_tok_s,
        "gpus": len(look.served.gpus),
        "failing_gpus": look.num_failing,
        "proposal": None
        if proposal is None
        else {
            "gpus": len(proposal.plan.gpus),
            "gained_tok_s": proposal.gained_tok_s,
            "least_served": proposal.least_served,
            **asdict(proposal.cost),
        },
    }


def _now() -> str:
    return datetime.now().astimezone().strftime("%H:%M:%S")
