"""The options of `loraplex plan` that say what is to be served."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from loraplex.cli.engine_of_plan import warn_of_other_engine
from loraplex.cli.measured_demand import measured_demand

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.planner.demand import Demand


def check_finite(**options: float | None) -> None:
    """Raise a usage error for a number that is none, or has no end."""
    for name, value in options.items():
        if value is not None and not math.isfinite(value):
            raise typer.BadParameter(
                f"{value} is not a finite number", param_hint=f"--{name.replace('_', '-')}"
            )


def asked_demand(
    workload: Path | None,
    adapters: Path | None,
    prompt_tokens: float | None,
    output_tokens: float | None,
    *,
    from_url: str | None = None,
    api_key: str | None = None,
    profile: Profile | None = None,
) -> Demand:
    """Read the workload file or the table, or ask the server at `from_url`. Raises a usage error if not just
    one is given, or a table without lengths. Says if the server's engines are not those of `profile`."""
    from loraplex.planner.adapter_table import read_table, read_workload_demand

    check_finite(mean_prompt_tokens=prompt_tokens, mean_output_tokens=output_tokens)
    if [workload, adapters, from_url].count(None) != 2:
        raise typer.BadParameter(
            "say what is to be served: give --workload FILE or --adapters FILE or --from URL, one of them"
        )
    if adapters is None and (prompt_tokens is not None or output_tokens is not None):
        shown_by = "--workload" if from_url is None else "--from"
        raise typer.BadParameter(
            f"{shown_by} shows how long requests are; leave --mean-prompt-tokens and the like out"
        )
    if from_url is not None:
        measured = measured_demand(from_url, api_key, profile)
        if profile is not None:
            warn_of_other_engine(profile, measured.engine, from_url)
        return measured.demand
    if workload is not None:
        return read_workload_demand(workload)
    assert adapters is not None
    if prompt_tokens is None or output_tokens is None:
        raise typer.BadParameter(
            "a table says nothing of lengths; give --mean-prompt-tokens and --mean-output-tokens"
        )
    return read_table(adapters, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
