"""The profile that a plan is judged with, compared with the one that it was made with.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.twin_options import read_profile_of
from loraplex.core.errors import UserError

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.planner.plan import Plan

PlanProfile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="NAME|PATH", help="Default: the one that the plan was made with."),
]


def profile_of_plan(plan: Plan, given: Path | None) -> Profile:
    """Read the given profile, or the one that the plan names. Says on stderr if it is not the one that the
    plan was made with: plans know that one by a hash of its content, and old ones only by its name.

    Raises UserError if there is no such profile."""
    try:
        found = read_profile_of(given or Path(plan.profile), None)
    except UserError as error:
        if given is not None:
            raise
        raise UserError(
            f"the profile that the plan was made with cannot be read: {error}; if its file is elsewhere now, "
            "name it by --profile"
        ) from error
    if (words := _difference(plan, given, found)) is not None:
        typer.secho(words, fg=typer.colors.RED, err=True)
    return found


def _difference(plan: Plan, given: Path | None, found: Profile) -> str | None:
    """Return how the profile differs from the one that the plan was made with, and what to do; None if it
    does not."""
    from loraplex.planner.fingerprint import fingerprint

    if plan.profile_sha256 is None:
        if given is None or str(given) == plan.profile:
            return None
        return f"judged with the profile {given}; the plan was made with {plan.profile}"
    if fingerprint(found) == plan.profile_sha256:
        return None
    if given is None:
        differs = f"the profile {plan.profile} has changed since the plan was made"
    else:
        differs = f"the profile {given} is not the one that the plan was made with ({plan.profile})"
    return (
        f"{differs}: the plan may not suit what this one predicts; make the plan again with it, or name the "
        "old one's file by --profile"
    )
