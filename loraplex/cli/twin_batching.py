"""`loraplex twin batching`: batching policies side by side on one workload.

Imports are deferred until the command runs, to keep `--help` fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from loraplex.cli.batching_options import MaxDelay, parse_delay
from loraplex.cli.json_out import check_writable, files_saved, save_json
from loraplex.cli.table import Column, print_table, text_column
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
    StartPolicy,
    TwinOptions,
    WorkloadPath,
    read_inputs,
    read_profile_of,
)
from loraplex.core.batching import Batching, DelayBound
from loraplex.core.choices import choice
from loraplex.core.errors import OptionError, UserError
from loraplex.core.progress import Report, shown_progress
from loraplex.core.words import plural

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.twin.outcome import Outcome
    from loraplex.twin.replay import ReplayOptions
    from loraplex.workload.jsonl import WorkloadRequest

_OPTION: Final = "--policies"
_ALL: Final = ",".join(Batching)
_Policies = Annotated[
    str,
    typer.Option(
        _OPTION, help="Names with commas between them; all of them by default (see docs/batching.md)."
    ),
]


def _figure(key: str, heading: str, show: str) -> Column:
    return Column(key=key, heading=heading, kind=float, show=show.format)


# The most important columns first: a narrow terminal drops the last ones.
_COLUMNS: Final = (
    text_column("policy"),
    _figure("output_tok_s", "tok/s", "{:,.0f}"),
    _figure("ttft_mean_ms", "TTFT ms", "{:,.1f}"),
    _figure("ttft_p95_ms", "p95 ms", "{:,.1f}"),
    _figure("beyond_bound_ms", "beyond ms", "{:+,.0f}"),
    _figure("tpt_mean_ms", "TPT ms", "{:,.2f}"),
    _figure("e2e_mean_ms", "E2E ms", "{:,.1f}"),
    _figure("merged_share", "merged", "{:.0%}"),
)


def batching(
    profile: ProfilePath,
    workload: WorkloadPath,
    policies: _Policies = _ALL,
    max_delay_by_grouping: MaxDelay = None,
    model: Model = None,
    adapters: Adapters = None,
    ranks: Ranks = None,
    seconds: Seconds = None,
    kv_tokens: KvTokens = None,
    adapter_mib: AdapterMib = None,
    modules: Modules = None,
    max_running: MaxRunning = None,
    cold_start: StartPolicy = None,
    cpu_workers: CpuWorkers = None,
    max_copy_gb_per_s: MaxCopyRate = None,
    kv_swap_memory: KvSwapMemory = None,
    json_out: JsonPath = None,
) -> None:
    """Simulate a workload under several batching policies, and compare them."""
    check_writable(json_out, inputs=(profile, workload))
    named = _named(policies)
    bound = _bound(max_delay_by_grouping, named)
    found = _profile(profile, model)
    options = TwinOptions(
        adapters=adapters,
        ranks=ranks,
        slots=None,
        kv_tokens=kv_tokens,
        adapter_mib=adapter_mib,
        modules=modules,
        max_running=max_running,
        seconds=seconds,
        cold_start=cold_start,
        cpu_workers=cpu_workers,
        max_copy_gb_per_s=max_copy_gb_per_s,
        kv_swap_memory=kv_swap_memory,
    )
    outcomes = _simulated(found, *read_inputs(workload, options), named, bound)
    overloaded = [policy for policy, outcome in outcomes.items() if outcome.is_overloaded()]
    summaries = {policy: outcome.summary() for policy, outcome in outcomes.items()}
    beyond_s = _beyond_bound_s(outcomes, bound)

    def write_figures(path: Path) -> None:
        bounds = asdict(bound) if any(each.groups for each in named) else None
        save_json(
            path,
            {
                "profile": str(profile),
                "workload": str(workload),
                "max_delay": bounds,
                "beyond_bound_s": beyond_s,
                "overloaded": overloaded,
                "policies": summaries,
            },
        )

    with files_saved((json_out, write_figures)):
        _show(summaries, beyond_s, overloaded)


def _profile(path: Path, model: str | None) -> Profile:
    """Return the profile, refused if its engine has no batching policies."""
    from loraplex.perf.slot_profile import SlotProfile

    found = read_profile_of(path, model)
    if isinstance(found, SlotProfile):
        raise UserError(
            f"{path}: it is of an engine with slots, which has no batching policies to choose from; give "
            "a profile of our own engine, one of those that `loraplex profile list` shows"
        )
    return found


def _simulated(
    profile: Profile,
    requests: Sequence[WorkloadRequest],
    options: ReplayOptions,
    policies: Sequence[Batching],
    bound: DelayBound,
) -> dict[Batching, Outcome]:
    """Replay the workload under each policy."""
    from loraplex.twin.replay import replay

    outcomes: dict[Batching, Outcome] = {}
    expected = f"{len(policies)} {plural('run', len(policies))}"
    with shown_progress("simulating", expected=expected) as progress:
        for number, policy in enumerate(policies):
            report = partial(_report, progress, policy, number, len(policies))
            report(0.0)
            outcomes[policy] = replay(profile, requests, _under(policy, options, bound), report)
        progress("done", 1.0)
    return outcomes


def _show(
    summaries: Mapping[Batching, dict[str, Any]],
    beyond_s: Mapping[Batching, float | None],
    overloaded: Sequence[Batching],
) -> None:
    rows = [_row(name, summary, beyond_s.get(name)) for name, summary in summaries.items()]
    print_table(rows, _COLUMNS)
    typer.echo(
        "tok/s: output tokens. Means of the times to the first token (TTFT, with p95), of the whole\n"
        "time (E2E) and of that over output tokens (TPT). Merged: share of the steps. Beyond: the\n"
        "worst first token, against what --max-delay-by-grouping allows over fcfs, if that is among\n"
        "the policies; below 0 it is within."
    )
    if overloaded:
        typer.echo(f"overloaded under {', '.join(overloaded)}: it serves less than 90% of what is asked for")


def _report(progress: Report, policy: Batching, number: int, total: int, share: float) -> None:
    """Report the share of one of several runs that is done."""
    progress(policy, (number + share) / total)


def _named(text: str) -> list[Batching]:
    """Return the policies of `--policies`. Raises a usage error."""
    try:
        found = [choice("batching policy", name.strip(), Batching) for name in text.split(",")]
    except OptionError as error:
        raise typer.BadParameter(str(error), param_hint=_OPTION) from None
    for policy in found:
        if found.count(policy) > 1:
            raise typer.BadParameter(f"{policy} is named twice; leave one of them out", param_hint=_OPTION)
    return found


def _bound(text: str | None, policies: list[Batching]) -> DelayBound:
    """Return the bound for those policies that have one. Raises a usage error, also if none has."""
    with_bound = next((each for each in policies if each.groups), policies[0])
    return parse_delay(text, with_bound)


def _under(policy: Batching, options: ReplayOptions, bound: DelayBound) -> ReplayOptions:
    return replace(options, batching=policy, max_delay=bound if policy.groups else DelayBound())


def _beyond_bound_s(outcomes: Mapping[Batching, Outcome], bound: DelayBound) -> dict[Batching, float | None]:
    """Return by how much the worst first token of each other policy was beyond the bound, if it was also
    run first come, first served."""
    from loraplex.twin.delays import beyond_bound_s

    fcfs = outcomes.get(Batching.FCFS)
    if fcfs is None:
        return {}
    return {
        policy: beyond_bound_s(outcome.requests, fcfs.requests, bound)
        for policy, outcome in outcomes.items()
        if outcome is not fcfs
    }


def _row(policy: str, summary: Mapping[str, Any], beyond_s: float | None) -> dict[str, Any]:
    ttft, tpt, e2e = (summary[name] or {} for name in ("ttft_s", "tpt_s", "e2e_s"))
    times_s = {
        "ttft_mean_ms": ttft.get("mean"),
        "ttft_p95_ms": ttft.get("p95"),
        "tpt_mean_ms": tpt.get("mean"),
        "e2e_mean_ms": e2e.get("mean"),
        "beyond_bound_ms": beyond_s,
    }
    return {
        "policy": policy,
        "output_tok_s": summary["output_tok_s"],
        **{name: None if each is None else each * 1e3 for name, each in times_s.items()},
        "merged_share": summary["num_merged_steps"] / max(summary["num_steps"], 1),
    }
