"""The demand that a running server or fleet has measured.

Imports are deferred until a command runs, to keep `--help` fast.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import typer

from loraplex.cli.server_calls import struct_of
from loraplex.core.errors import UserError
from loraplex.core.progress import in_words

if TYPE_CHECKING:
    from loraplex.perf.named_profiles import Profile
    from loraplex.planner.demand import Demand
    from loraplex.server.adapter_responses import DemandInfo, EngineInfo

_PATH: Final = "/v1/demand"
_FEW: Final = 100
"""Number of requests below which rates are too uncertain to go unmentioned."""


class Measured(NamedTuple):
    """A measured demand. `is_rough`: rates are of few requests. `engine`: of the server, if it says."""

    demand: Demand
    is_rough: bool
    engine: EngineInfo | None = None


def measured_demand(url: str, api_key: str | None, profile: Profile | None = None) -> Measured:
    """Return the demand of the last half hour; says on stderr what a plan for it leaves out. Adapters without
    requests are in it, with a rate of zero. `profile`: of the engines that are planned for; adapters that
    these do not take are left out.

    Raises UserError if no such server answers, or if it has answered no requests for adapters."""
    from loraplex.planner.demand import AdapterDemand, Demand
    from loraplex.server.adapter_responses import DemandInfo

    found = struct_of(DemandInfo, url, _PATH, api_key, kind="a measured demand")
    if not found.data:
        raise UserError(f"{url} serves no adapters, so that there is nothing to plan; load some first")
    if not found.prompt_tokens or not found.output_tokens or found.seconds <= 0:
        raise UserError(
            f"{url} has answered no request for an adapter within the last {in_words(found.seconds)}, so "
            "that there is no demand to plan for; send it traffic first, or give a table with --adapters"
        )
    _warn_of(found)
    demand = Demand(
        adapters=tuple(
            AdapterDemand(name=each.name, rank=each.rank, rate_rps=each.requests / found.seconds)
            for each in found.data
        ),
        prompt_tokens=max(found.prompt_tokens, 1.0),
        output_tokens=max(found.output_tokens, 1.0),
    )
    if profile is not None:
        demand = _served_by(profile, demand)
    return Measured(demand, is_rough=_num_requests(found) < _FEW, engine=found.engine)


def _served_by(profile: Profile, demand: Demand) -> Demand:
    """Return the demand for the adapters that the engines take. Raises PlanError if that is none of them."""
    from loraplex.planner.ranks import check_ranks, serves, too_large

    served = tuple(each for each in demand.adapters if serves(profile, each))
    if not served:
        check_ranks(profile, demand.adapters)
    if num_left_out := len(demand.adapters) - len(served):
        first = next(each for each in demand.adapters if not serves(profile, each))
        others = f", with {num_left_out - 1:,} more of such ranks" if num_left_out > 1 else ""
        typer.echo(
            f"{too_large(profile, first)}: it is left out of the plan{others}; serve such adapters apart, "
            "merged into their base model",
            err=True,
        )
    return replace(demand, adapters=served)


def engine_at(url: str, api_key: str | None) -> EngineInfo | None:
    """Return what the engines of a server are; None if it does not say."""
    from loraplex.server.adapter_responses import DemandInfo

    return struct_of(DemandInfo, url, _PATH, api_key, kind="a measured demand").engine


def _num_requests(found: DemandInfo) -> int:
    return sum(each.requests for each in found.data)


def _warn_of(found: DemandInfo) -> None:
    total = _num_requests(found)
    if total < _FEW:
        typer.echo(
            f"the server has seen {total} requests for adapters within {in_words(found.seconds)}: the rates "
            "are rough",
            err=True,
        )
    if found.base_requests:
        share = found.base_requests / (found.base_requests + total)
        typer.echo(
            f"{share:.0%} of the requests are for the base model alone, which the plan leaves out: have room "
            "for them",
            err=True,
        )
