"""What `loraplex plan` prints of a plan and its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import typer

from loraplex.cli.table import Column, number_column, print_table
from loraplex.core.words import plural
from loraplex.planner.plan import whole_adapters

if TYPE_CHECKING:
    from loraplex.planner.check import GpuCheck, PlanCheck
    from loraplex.planner.plan import Plan


def show_plan(plan: Plan, checked: PlanCheck | None) -> None:
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
    num_adapters, num_copies = len(whole_adapters(plan.gpus)), sum(len(gpu.adapters) for gpu in plan.gpus)
    copies = f" in {num_copies:,} copies" if num_copies > num_adapters else ""
    typer.echo(
        f"{num_adapters:,} {plural('adapter', num_adapters)}{copies} on {len(plan.gpus):,} "
        f"{plural('GPU', len(plan.gpus))}, packed by {plan.packer} for {plan.profile}"
    )
    if checked is not None and checked.starves:
        starved = {number: gpu for number, gpu in enumerate(checked.gpus) if gpu.num_starved}
        too_large = [str(number) for number, gpu in starved.items() if not gpu.fits]
        slow = [str(number) for number, gpu in starved.items() if gpu.fits]
        if too_large:
            warn(
                f"GPU {', '.join(too_large)}: so many slots leave no memory for requests; plan with another "
                "--packer"
            )
        if slow:
            warn(
                f"starving: GPU {', '.join(slow)} serves less than 0.9 of what is offered; plan with more "
                "--gpus, or with lower rates"
            )


def warn(message: str) -> None:
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


def figures_of(checked: PlanCheck) -> dict[str, Any]:
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
