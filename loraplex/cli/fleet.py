"""`loraplex fleet`: many replicas behind a router, simulated and live.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli import fleet_live
from loraplex.cli import fleet_options as option
from loraplex.cli.batching_options import BatchingPolicy, MaxDelay
from loraplex.cli.configured import from_environment
from loraplex.cli.durations import Duration
from loraplex.cli.flags import App
from loraplex.cli.fleet_conditions import conditions_of
from loraplex.cli.fleet_inputs import (
    check_files,
    check_fit,
    cut_to,
    fleet_inputs,
    named_policies,
    plans_in_words,
)
from loraplex.cli.fleet_show import capacity_in_words, is_known, show_outcome, show_overload, show_policies
from loraplex.cli.json_out import files_saved, save_json, save_picture
from loraplex.cli.slo import SloTpot, SloTpt, SloTtft, parse_slo
from loraplex.cli.tenant_options import MaxBorrowing, MaxTtft, Tenants
from loraplex.cli.tenant_show import show_tenants
from loraplex.cli.twin_options import (
    AdapterMib,
    Adapters,
    JsonPath,
    KvTokens,
    MaxRunning,
    Modules,
    ProfilePath,
    Ranks,
    Seconds,
    Slots,
    TwinOptions,
    WorkloadPath,
)
from loraplex.core.batching import Batching
from loraplex.core.errors import UserError
from loraplex.core.progress import shown_progress
from loraplex.core.words import plural
from loraplex.fleet.policy_words import PLACEMENTS_EXPLAINED, ROUTINGS_EXPLAINED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from loraplex.fleet.policy import Policy
    from loraplex.twin.fleet import FleetOutcome
    from loraplex.twin.fleet_compare import Capacity, FleetInputs

app = App(help="Serve with several replicas behind a router, or simulate such a fleet.", no_args_is_help=True)
app.command(context_settings=from_environment("fleet", "serve"))(fleet_live.serve)
for _command in (
    *(fleet_live.status, fleet_live.explain),
    *(fleet_live.drain, fleet_live.restart, fleet_live.scale),
):
    app.command()(_command)

_MOST_SEEDS: Final = 1_000


@app.command()
def simulate(
    profile: ProfilePath,
    workload: WorkloadPath,
    replicas: option.Replicas,
    routing: Annotated[
        str, typer.Option(help="Which replica a request is sent to; `loraplex fleet policies` lists them.")
    ] = "auto",
    placement: Annotated[
        str | None,
        typer.Option(
            help="Which replicas serve an adapter; default: everywhere, or auto for the routing auto."
        ),
    ] = None,
    migrate: Annotated[
        bool, typer.Option("--migrate", help="Requests may leave an overloaded replica for another one.")
    ] = False,
    slo_tpt: SloTpt = None,
    slo_tpot: SloTpot = None,
    slo_ttft: SloTtft = None,
    period: option.Period = Duration(60),
    link: option.Link = None,
    costs: option.Costs = "steps",
    warm: option.Warm = False,
    adapters: Adapters = None,
    ranks: Ranks = None,
    slots: Slots = None,
    seconds: Seconds = None,
    kv_tokens: KvTokens = None,
    adapter_mib: AdapterMib = None,
    modules: Modules = None,
    max_running: MaxRunning = None,
    batching: BatchingPolicy = Batching.FCFS,
    max_delay_by_grouping: MaxDelay = None,
    tenant: Tenants = None,
    max_borrowing: MaxBorrowing = None,
    max_ttft: MaxTtft = None,
    json_out: JsonPath = None,
    plot: option.Plot = None,
) -> None:
    """Simulate a workload on a fleet under one policy."""
    from loraplex.fleet.policy import Policy
    from loraplex.twin.fleet_figures import figures_of
    from loraplex.twin.tenant_figures import summary_of

    check_files(profile, workload, json_out, plot)
    policy = Policy.of(routing, placement, migrates=migrate)
    options = TwinOptions(
        adapters=adapters,
        ranks=ranks,
        slots=slots,
        kv_tokens=kv_tokens,
        adapter_mib=adapter_mib,
        modules=modules,
        max_running=max_running,
        seconds=seconds,
        batching=batching,
        max_delay=max_delay_by_grouping,
        tenants=tenant,
        max_borrowing=max_borrowing,
        max_ttft=max_ttft,
    )
    slo = parse_slo(slo_tpt, slo_tpot, slo_ttft)
    inputs = fleet_inputs(profile, workload, replicas, slo, period, link, costs, warm, options)
    conditions = conditions_of(profile, workload, inputs)
    check_fit([policy], inputs)
    outcome = _simulated(policy, inputs)
    figures = figures_of(outcome, inputs.options.slo)
    rights = inputs.options.replay
    summary = outcome.all.summary() | summary_of(outcome.all, rights.tenants, rights.max_ttft_s)

    def write_figures(path: Path) -> None:
        document = {
            "policy": policy.name,
            **conditions,
            "figures": asdict(figures),
            "summary": summary,
            "timeline": asdict(outcome.all.timeline()),
            "replicas": [asdict(each) for each in outcome.replicas],
        }
        save_json(path, document)

    def draw(path: Path) -> None:
        from loraplex.cli.fleet_plot import draw_outcome

        title = f"{_title(workload, replicas, profile)}: {policy.name}"
        save_picture(path, draw_outcome(outcome, title=title))

    with files_saved((json_out, write_figures), (plot, draw)):
        show_outcome(outcome, figures, inputs.options.slo)
        show_tenants(summary)


@app.command()
def compare(
    profile: ProfilePath,
    workload: WorkloadPath,
    replicas: option.Replicas,
    policies: option.Policies,
    seeds: Annotated[
        int,
        typer.Option(
            help="Runs of each policy: the workload, and copies of it in which nearby requests swap places."
        ),
    ] = 5,
    slo_tpt: SloTpt = None,
    slo_tpot: SloTpot = None,
    slo_ttft: SloTtft = None,
    period: option.Period = Duration(60),
    link: option.Link = None,
    costs: option.Costs = "steps",
    warm: option.Warm = False,
    adapters: Adapters = None,
    ranks: Ranks = None,
    slots: Slots = None,
    seconds: Seconds = None,
    kv_tokens: KvTokens = None,
    adapter_mib: AdapterMib = None,
    modules: Modules = None,
    max_running: MaxRunning = None,
    batching: BatchingPolicy = Batching.FCFS,
    max_delay_by_grouping: MaxDelay = None,
    json_out: JsonPath = None,
    plot: option.Plot = None,
) -> None:
    """Simulate the same workload under several policies, and compare them."""
    from loraplex.twin.fleet_compare import compare_policies
    from loraplex.twin.fleet_figures import interval_of, mean_of

    check_files(profile, workload, json_out, plot)
    if not 1 <= seeds <= _MOST_SEEDS:
        raise typer.BadParameter(
            f"must be at least 1 and at most {_MOST_SEEDS:,}, not {seeds:,}", param_hint="--seeds"
        )
    named = named_policies(policies)
    options = TwinOptions(
        adapters=adapters,
        ranks=ranks,
        slots=slots,
        kv_tokens=kv_tokens,
        adapter_mib=adapter_mib,
        modules=modules,
        max_running=max_running,
        seconds=seconds,
        batching=batching,
        max_delay=max_delay_by_grouping,
    )
    slo = parse_slo(slo_tpt, slo_tpot, slo_ttft)
    inputs = fleet_inputs(profile, workload, replicas, slo, period, link, costs, warm, options)
    conditions = conditions_of(profile, workload, inputs)
    check_fit(named, inputs)
    number = len(named) * seeds
    expected = f"{number:,} {plural('run', number)}{plans_in_words(named, inputs)}"
    with shown_progress("simulating", expected=expected) as progress:
        found = compare_policies(inputs, named, seeds, progress)
    means = {name: mean_of([run.figures for run in runs]) for name, runs in found.items()}
    intervals = {name: interval_of([run.figures for run in runs]) for name, runs in found.items()}

    def write_figures(path: Path) -> None:
        shown = {name: {**asdict(mean), "interval_95": intervals[name]} for name, mean in means.items()}
        save_json(path, {**conditions, "num_seeds": seeds, "policies": shown})

    def draw(path: Path) -> None:
        from loraplex.cli.fleet_plot import draw_policies

        title = _title(workload, replicas, profile)
        save_picture(path, draw_policies(found, slo=inputs.options.slo, title=title))

    with files_saved((json_out, write_figures), (plot, draw)):
        has_link = inputs.options.link is not None
        show_policies(means, intervals, slo=inputs.options.slo, num_seeds=seeds, has_link=has_link)
        for name, runs in found.items():
            show_overload(f"overloaded under {name}", runs[0].overloaded)


@app.command()
def capacity(
    profile: ProfilePath,
    workload: WorkloadPath,
    replicas: option.Replicas,
    policies: option.Policies,
    attainment: Annotated[float, typer.Option(help="Share of requests that must attain the SLO.")] = 0.99,
    slo_tpt: SloTpt = None,
    slo_tpot: SloTpot = None,
    slo_ttft: SloTtft = None,
    period: option.Period = Duration(60),
    link: option.Link = None,
    costs: option.Costs = "steps",
    warm: option.Warm = False,
    adapters: Adapters = None,
    ranks: Ranks = None,
    slots: Slots = None,
    seconds: Seconds = None,
    kv_tokens: KvTokens = None,
    adapter_mib: AdapterMib = None,
    modules: Modules = None,
    max_running: MaxRunning = None,
    batching: BatchingPolicy = Batching.FCFS,
    max_delay_by_grouping: MaxDelay = None,
    json_out: JsonPath = None,
    plot: option.Plot = None,
) -> None:
    """Find the highest request rate at which each policy still attains the SLO.

    The workload is played faster and slower. It is repeated at rates at which it would be too short, or have
    too few requests, to tell.
    """
    from loraplex.twin.fleet_compare import capacities
    from loraplex.twin.highest_rate import TOLERANCE

    check_files(profile, workload, json_out, plot)
    if not 0 < attainment <= 1:
        raise typer.BadParameter("must be above 0 and at most 1", param_hint="--attainment")
    named = named_policies(policies)
    options = TwinOptions(
        adapters=adapters,
        ranks=ranks,
        slots=slots,
        kv_tokens=kv_tokens,
        adapter_mib=adapter_mib,
        modules=modules,
        max_running=max_running,
        seconds=seconds,
        batching=batching,
        max_delay=max_delay_by_grouping,
    )
    slo = parse_slo(slo_tpt, slo_tpot, slo_ttft)
    inputs = fleet_inputs(profile, workload, replicas, slo, period, link, costs, warm, options)
    conditions = conditions_of(profile, workload, inputs)
    check_fit(named, inputs)
    if seconds is not None:  # the same requests at every rate, all of which may finish
        inputs = cut_to(inputs, seconds)
    if inputs.workload[0].arrival_s == inputs.workload[-1].arrival_s:
        raise UserError(f"{workload}: all requests come at one moment, so that there is no rate to change")
    expected = f"about 12 runs for each of {len(named)}{plans_in_words(named, inputs)}"
    with shown_progress("bisecting", expected=expected) as progress:
        found = capacities(inputs, named, attainment, progress)
    within = f"{attainment:.1%} of requests {inputs.options.slo.in_words()}"

    def write_figures(path: Path) -> None:
        save_json(path, {**conditions, **_capacity_figures(found, attainment)})

    def draw(path: Path) -> None:
        from loraplex.cli.fleet_plot import draw_capacities

        title = f"{_title(workload, replicas, profile)}: the highest rate with {within}"
        save_picture(path, draw_capacities(found, attainment=attainment, title=title))

    with files_saved((json_out, write_figures), (plot, draw)):
        typer.echo(f"{within}; rates are found to within {TOLERANCE:.0%}")
        width = max(map(len, found))
        for name, each in found.items():
            typer.echo(f"{name:{width}} {capacity_in_words(each)}")


@app.command()
def policies() -> None:
    """List all routings and placements, the parts of a policy."""
    from loraplex.fleet.policy import MIGRATE, PLACEMENTS, ROUTINGS

    width = max(map(len, (*ROUTINGS, *PLACEMENTS)))
    for heading, names, explained in (
        ("routing: sends a request to", ROUTINGS, ROUTINGS_EXPLAINED),
        ("placement: an adapter lives on", PLACEMENTS, PLACEMENTS_EXPLAINED),
    ):
        typer.echo(heading)
        for name in names:
            typer.echo(f"  {name:{width}}  {explained[name]}")
    typer.echo(f"a policy is ROUTING+PLACEMENT, and with +{MIGRATE} requests leave overloaded replicas")


def _title(workload: Path, replicas: int, profile: Path) -> str:
    return f"{workload.name} on {replicas:,} {plural('replica', replicas)} of {profile.name}"


def _simulated(policy: Policy, inputs: FleetInputs) -> FleetOutcome:
    from loraplex.twin.fleet_run import FleetRuns

    runs = FleetRuns(inputs.profile, inputs.workload, inputs.options)
    number = len(inputs.workload)
    expected = f"{number:,} {plural('request', number)}{plans_in_words([policy], inputs)}"
    # No estimate: an overloaded fleet has much left to do after the last arrival.
    with shown_progress("simulating", expected=expected, left=None) as progress:
        progress(policy.name, None)
        return runs.run(policy, report=lambda share: progress(policy.name, share))


def _capacity_figures(found: Mapping[str, Capacity], attainment: float) -> dict[str, Any]:
    """Return the rates and their trials, for the JSON file."""
    from loraplex.twin.highest_rate import TOLERANCE

    return {
        "num_seeds": 1,
        "attainment": attainment,
        "tolerance": TOLERANCE,
        "capacity_rps": {name: each.rps if is_known(each) else None for name, each in found.items()},
        "reasons": {name: capacity_in_words(each) for name, each in found.items() if not is_known(each)},
        "tried": {name: each.tried for name, each in found.items()},
        "trial_s": {name: each.trial_s for name, each in found.items()},
        "trial_requests": {name: each.trial_requests for name, each in found.items()},
    }
