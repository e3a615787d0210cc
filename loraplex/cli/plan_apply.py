"""`loraplex plan apply` and `release`: from a plan to the engines that serve it.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from loraplex.core.errors import UserError

if TYPE_CHECKING:
    from loraplex.planner.plan import Plan

_ADAPTERS_DIR: Final = "adapters"


def apply(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file of `loraplex plan make`.")],
    vllm_commands: Annotated[
        bool,
        typer.Option("--vllm-commands", help="Print the commands that start vLLM so, one for each GPU."),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="The base model in these commands; default: the model of the profile."),
    ] = None,
    adapters_dir: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where vLLM finds a subfolder for each adapter: ./adapters."),
    ] = None,
) -> None:
    """Serve as planned: print the commands that start vLLM so."""
    from loraplex.planner.plan_file import read_plan

    read = read_plan(plan)
    if not vllm_commands:
        raise UserError("say how the plan is applied: give --vllm-commands")
    _print_commands(read, model, adapters_dir)


def _print_commands(plan: Plan, model: str | None, adapters_dir: str | None) -> None:
    from loraplex.perf.named_profiles import find_profile, model_of
    from loraplex.planner.vllm_commands import vllm_commands

    named = model or model_of(find_profile(Path(plan.profile)))
    commands = vllm_commands(plan, model=named, adapters_dir=adapters_dir or _ADAPTERS_DIR)
    typer.echo("\n\n".join(commands))
    if model is None:
        typer.echo(
            f"the profile calls the model {named!r}; give the checkpoint that you serve with --model",
            err=True,
        )
    for number, gpu in enumerate(plan.gpus):
        if not gpu.adapters:
            typer.echo(f"GPU {number} has no adapters in the plan, and gets no command", err=True)
