"""Prints a plan, its check, and the alternatives to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from loraplex.cli.table import Column, number_column, print_table, text_column
from loraplex.core.errors import UserError
from loraplex.core.words import plural
from loraplex.planner.plan import whole_adapters

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.planner.alternatives import Alternative
    from loraplex.planner.check import GpuCheck, PlanCheck
    from loraplex.planner.plan import Plan

_PER_S: Final = "{:,.0f}".format
_MUCH_QUICKER: Final = 0.5
"""Share of the plan's TTFT below which another plan's is pointed out."""
_MOST_SHOWN: Final = 8
"""GPUs that a line names before it says how many more there are."""


def show_plan(plan: Plan, checked: PlanCheck | None = None, profile: Profile | None = None) -> None:
    """Print each GPU, with what it was found to do if it was checked with this profile."""
    unit = unit_of(plan, profile)
    rows: list[dict[str, Any]] = []
    for number, gpu in enumerate(plan.gpus):
        row: dict[str, Any] = {
            "gpu": number,
            "adapters": len(gpu.adapters),
            "slots": gpu.num_slots,
            "rank": gpu.max_rank,
            "req_s": f"{gpu.rate_rps:.2f}",
        }
        if checked is not None and profile is not None:
            row.update(_figures_of(checked.gpus[number], profile))
        rows.append(row)
    shown = _FIGURES if checked is not None else {"req_s": _FIGURES["req_s"]}
    print_table(
        rows,
        [
            number_column("gpu", heading=unit),
            *(number_column(key, heading=heading) for key, heading in _COUNTS.items()),
            *(
                Column(key=key, heading=heading, kind=str, show=str)
                for key, heading in shown.items()
                if any(key in row for row in rows)
            ),
        ],
    )
    typer.echo(summary_of(plan, unit))
    if spare := plan.num_spare_gpus:
        needed, asked = len(plan.gpus), len(plan.gpus) + spare
        typer.echo(
            f"{needed:,} of the {asked:,} {plural(unit, asked)} will do, and the plan has nothing for the "
            f"other {spare:,}: `loraplex plan apply` wants a fleet of {needed:,} {plural('replica', needed)} "
            f"(`loraplex fleet scale {needed}`)"
        )
    if plan.objective.has_limits:
        typer.echo(f"for each {unit}: {', '.join(plan.objective.words())}")
    if checked is not None and not checked.holds:
        _say_what_is_wrong(plan, checked, unit)


def show_adapters(plan: Plan) -> None:
    """Print where each adapter is, GPU by GPU."""
    rows = [
        {"gpu": number, "adapter": each.name, "rank": each.rank, "req_s": f"{each.rate_rps:.4g}"}
        for number, gpu in enumerate(plan.gpus)
        for each in gpu.adapters
    ]
    heading = unit_of(plan)
    columns = (number_column("gpu", heading=heading), text_column("adapter"), number_column("rank"))
    print_table(rows, [*columns, Column(key="req_s", heading="req/s", kind=str, show=str)])


def unit_of(plan: Plan, profile: Profile | None = None) -> str:
    """Return the word for what serves one part of a plan: replicas may compute on a CPU. `profile`: of the
    plan; looked up if it is None."""
    from loraplex.perf.cost_model import CostModel
    from loraplex.perf.named_profiles import find_profile

    try:
        found = profile or find_profile(Path(plan.profile))
    except UserError:  # of another machine, perhaps
        return "GPU"
    return "replica" if isinstance(found, CostModel) and found.subject.device == "cpu" else "GPU"


def summary_of(plan: Plan, unit: str = "GPU") -> str:
    """Return one line on the plan."""
    num_adapters, num_copies = len(whole_adapters(plan.gpus)), sum(len(gpu.adapters) for gpu in plan.gpus)
    copies = f" in {num_copies:,} copies" if num_copies > num_adapters else ""
    return (
        f"{num_adapters:,} {plural('adapter', num_adapters)}{copies} on {len(plan.gpus):,} "
        f"{plural(unit, len(plan.gpus))}, packed by {plan.packer} for {plan.profile}"
    )


def show_alternatives(checked: PlanCheck, found: Sequence[Alternative]) -> None:
    """Print the plan beside its alternatives: `found`, which begins with the plan itself."""
    typer.echo("\nBeside it, for the same adapters and requests:")
    rows: list[dict[str, Any]] = []
    for each in found:
        known = {"found": each.why_not} if each.checked is None else _totals_of(each.checked)
        rows.append({"plan": each.name, **known})
    columns = (
        text_column("plan"),
        Column(key="gpus", heading="GPUs", kind=int, show="{:,}".format),
        Column(key="served", heading="served", kind=float, show="{:.0%}".format),
        Column(key="tok_s", heading="tok/s", kind=float, show=_PER_S),
        Column(key="ttft_s", heading="TTFT ms", kind=float, show=lambda each: f"{each * 1e3:,.0f}"),
        Column(key="itl_s", heading="ITL ms", kind=float, show=lambda each: f"{each * 1e3:.1f}"),
        text_column("found"),
    )
    print_table(rows, columns)
    if checked.holds and (quicker := _much_quicker(rows)):
        typer.echo(
            f"{quicker['plan']} serves this with a TTFT of {quicker['ttft_s'] * 1e3:,.0f} ms instead of "
            f"{rows[0]['ttft_s'] * 1e3:,.0f}: choose --packer {quicker['plan']}, or give a "
            "limit by --slo-ttft"
        )


def _much_quicker(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the packer's plan with by far the shortest TTFT on as many GPUs as the first plan; None if there
    is none."""
    ours, *others = rows
    found = [
        row
        for row in others
        if not row["plan"].startswith("one GPU")
        and row.get("found") == ours["found"]
        and row.get("gpus", 0) <= ours["gpus"]
        and row.get("ttft_s") is not None
        and row["ttft_s"] < _MUCH_QUICKER * (ours["ttft_s"] or 0.0)
    ]
    return min(found, key=lambda row: row["ttft_s"], default=None)


def figures_of(checked: PlanCheck, profile: Profile, found: Sequence[Alternative] = ()) -> dict[str, Any]:
    """Return the figures as they go into a JSON file."""
    return {
        "holds": checked.holds,
        "starves": checked.starves,
        "seeds": list(checked.seeds),
        "duration_s": checked.duration_s,
        "gpus": [
            {
                "adapters": len(each.gpu.adapters),
                "num_slots": each.gpu.num_slots,
                "utilisation": each.utilisation,
                "most_tok_s": each.most_tok_s,
                "missed": list(each.missed),
                "error_bars": {
                    key: bar.plus_minus for key in _WITH_BARS if (bar := each.bar(key, profile)) is not None
                },
                "runs": [asdict(run) for run in each.runs],
            }
            for each in checked.gpus
        ],
        "alternatives": [
            {"plan": each.name, "why_not": each.why_not}
            if each.checked is None
            else {"plan": each.name, "holds": each.checked.holds, **_totals_of(each.checked)}
            for each in found
        ],
    }


def warn(message: str) -> None:
    """Print what the user should not overlook."""
    typer.secho(message, fg=typer.colors.RED)


def _say_what_is_wrong(plan: Plan, checked: PlanCheck, unit: str) -> None:
    from loraplex.planner.make import BASELINES

    too_large, slow = _starving(checked)
    if too_large:
        warn(
            f"{_numbered(too_large, unit)}: so many slots leave no memory for requests; plan with --packer "
            "max-pack, which chooses slots that fit"
        )
    if slow:
        verb = "serves" if len(slow) == 1 else "serve"
        fix = (
            "plan with --packer max-pack or improved, which look whether GPUs starve"
            if plan.packer in BASELINES
            else "give more --gpus, or a larger --headroom"
        )
        warn(f"starving: {_numbered(slow, unit)} {verb} less than 0.9 of what is offered; {fix}")
    for number, gpu in enumerate(checked.gpus):
        if gpu.missed and not gpu.num_starved:
            warn(
                f"{unit} {number}: {' and '.join(gpu.missed)}; plan with more --gpus, --packer least-rate, "
                "or a higher limit"
            )


def _starving(checked: PlanCheck) -> tuple[list[int], list[int]]:
    """Return the GPUs that starve because adapters do not fit, and those that are too slow."""
    starved = [number for number, gpu in enumerate(checked.gpus) if gpu.num_starved]
    too_large = [number for number in starved if not checked.gpus[number].fits]
    return too_large, [number for number in starved if checked.gpus[number].fits]


def _numbered(gpus: Sequence[int], unit: str = "GPU") -> str:
    shown = ", ".join(map(str, gpus[:_MOST_SHOWN]))
    more = len(gpus) - _MOST_SHOWN
    return f"{unit} {shown}" + (f" and {more:,} more" if more > 0 else "")


def _figures_of(gpu: GpuCheck, profile: Profile) -> dict[str, Any]:
    def shown(figure: str, form: Callable[[float], str]) -> str | None:
        bar = gpu.bar(figure, profile)
        return None if bar is None else f"{form(bar.mean)} ± {form(bar.plus_minus)}"

    figures = {
        "served": f"{gpu.share_served:.0%}",
        "tok_s": shown("served_tok_s", _PER_S),
        "ttft": shown("ttft_s", lambda each: f"{each * 1e3:,.0f}"),
        "itl": shown("itl_s", lambda each: f"{each * 1e3:.1f}"),
        "starved": f"{gpu.num_starved} of {len(gpu.runs)}",
    }
    return figures if gpu.utilisation is None else {"used": f"{gpu.utilisation:.0%}", **figures}


def _totals_of(checked: PlanCheck) -> dict[str, Any]:
    too_large, slow = _starving(checked)
    found = [
        *([f"{_numbered(too_large)}: slots leave no memory"] if too_large else []),
        *([f"starves {_numbered(slow)}"] if slow else []),
        *(f"GPU {number}: {each}" for number, gpu in enumerate(checked.gpus) for each in gpu.missed[:1]),
    ]
    return {
        "gpus": len(checked.gpus),
        "served": checked.share_served,
        "tok_s": sum(gpu.mean("served_tok_s") or 0.0 for gpu in checked.gpus),
        "ttft_s": checked.mean("ttft_s"),
        "itl_s": checked.mean("itl_s"),
        "found": "; ".join(found[:2]) or "nobody starves",
    }


_COUNTS: Final = {"adapters": "adapters", "slots": "slots", "rank": "largest rank"}
_FIGURES: Final = {
    "req_s": "req/s",
    "used": "used",
    "served": "served",
    "tok_s": "tok/s",
    "ttft": "TTFT ms",
    "itl": "ITL ms",
    "starved": "seeds starved",
}
_WITH_BARS: Final = ("served_tok_s", "ttft_s", "itl_s")
