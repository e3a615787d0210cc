"""Compares the profile of a plan with the engines that a server says it has: predictions by the profile of
another machine or model are no predictions of it.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.server.adapter_responses import EngineInfo


def warn_of_other_engine(profile: Profile, engine: EngineInfo | None, url: str) -> str | None:
    """Say on stderr that a profile is not of the engines of the server at `url`, and what to do; return what
    was said. Servers that do not know their engines, as fronts of other servers, are not judged."""
    words = None if engine is None else other_engine(profile, engine, url)
    if words is not None:
        typer.secho(words, fg=typer.colors.RED, err=True)
    return words


def other_engine(profile: Profile, engine: EngineInfo, url: str) -> str | None:
    """Return how a profile's engine differs from a server's, with the fix; None if it does not."""
    from loraplex.perf.cost_model import CostModel
    from loraplex.perf.named_profiles import profile_of
    from loraplex.perf.subject import Subject

    there = Subject(
        machine=engine.machine,
        device=engine.device,
        model=engine.model,
        dtype=engine.dtype,
        num_layers=engine.num_layers,
    )
    if not isinstance(profile, CostModel):
        differences = [f"an engine with slots for {profile.model!r} instead of loraplex's own engine"]
    else:
        differences = profile.subject.differences(there)
    if not differences:
        return None
    fitting = _name_of(profile_of(there))
    fix = (
        "measure one there with `loraplex profile`, and give its file by --profile"
        if fitting is None
        else f"plan with --profile {fitting}"
    )
    return (
        f"the profile is not of the engines of {url}: {'; '.join(differences)}; what it predicts may be far "
        f"off there: {fix}"
    )


def _name_of(profile: Profile | None) -> str | None:
    from loraplex.perf.named_profiles import named_profiles

    return next((name for name, each in named_profiles().items() if each == profile), None)
