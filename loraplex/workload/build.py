"""Makes a workload from a recipe."""

from __future__ import annotations

from functools import partial

import numpy as np

from loraplex.workload import recipe as defaults
from loraplex.workload.arrivals import Arrivals, RenewalArrivals, ReplayArrivals
from loraplex.workload.build_parts import blaming, lengths_of, popularity_of, ranks_of, speed_for
from loraplex.workload.build_traces import counted_workload, replayed_workload
from loraplex.workload.gaps import Gaps
from loraplex.workload.made import End, MadeWorkload
from loraplex.workload.mix import parse_mix
from loraplex.workload.rates import ChangingRates, ConstantRates, Rates
from loraplex.workload.recipe import ArrivalKind, Recipe, Source
from loraplex.workload.replay import read_times_s
from loraplex.workload.request import Workload, WorkloadHeader
from loraplex.workload.streams import Purpose, stream
from loraplex.workload.tenants import TenantedWorkload, parse_tenant_mix
from loraplex.workload.traffic import PerAdapterTraffic, SharedTraffic, Traffic


def make_workload(recipe: Recipe) -> Workload:
    """Return the workload of a recipe. Files are opened, but nothing is drawn yet.

    Problems with files raise WorkloadError here, or when requests are drawn.
    """
    made = _untenanted(recipe)
    if recipe.tenants is None:
        return made
    with blaming("tenants"):
        mix = parse_tenant_mix(recipe.tenants)
    return TenantedWorkload(requests=made, mix=mix, seed=recipe.seed)


def _untenanted(recipe: Recipe) -> Workload:
    match recipe.source:
        case None:
            return _drawn_workload(recipe)
        case Source.AZURE | Source.VTC:
            return replayed_workload(recipe)
        case Source.MAF | Source.SERVEGEN:
            return counted_workload(recipe)


def _drawn_workload(recipe: Recipe) -> MadeWorkload:
    num_adapters = recipe.num_adapters or defaults.DEFAULT_NUM_ADAPTERS
    ranks = ranks_of(recipe, num_adapters)
    end = End(duration_s=recipe.duration_s, num_requests=recipe.num_requests)
    if end == End() and recipe.arrival_kind is not ArrivalKind.REPLAY:
        end = End(duration_s=defaults.DEFAULT_DURATION_S)
    duration_s = end.duration_s
    if recipe.is_per_adapter:
        traffic: Traffic = PerAdapterTraffic(rates=_rates(recipe, ranks))
    else:
        arrivals, expected_s = _arrivals(recipe)
        popularity = popularity_of(recipe, ranks)
        traffic = SharedTraffic(arrivals=arrivals, popularity=popularity, duration_s=duration_s or expected_s)
        if end == End():
            duration_s = expected_s
    return MadeWorkload(
        header=WorkloadHeader(ranks=ranks, duration_s=duration_s, recipe=recipe.given()),
        traffic=traffic,
        lengths=lengths_of(recipe),
        end=end,
        seed=recipe.seed,
    )


def _arrivals(recipe: Recipe) -> tuple[Arrivals, float | None]:
    """Return the arrivals, and how long they are expected to last if no duration is given."""
    if recipe.replay is None:
        with blaming("cv"):
            gaps = _gaps(recipe)
        rate = recipe.rate or defaults.DEFAULT_RATE_PER_S
        expected_s = None if recipe.num_requests is None else recipe.num_requests / rate
        return RenewalArrivals(rate_per_s=rate, gaps=gaps), expected_s
    times_s = partial(read_times_s, recipe.replay)
    speed, last_s = speed_for(recipe.rate, times_s)
    return ReplayArrivals(times_s=times_s, speed=speed), round(last_s / speed, 6) or None


def _gaps(recipe: Recipe) -> Gaps:
    cv = recipe.cv or defaults.DEFAULT_CV
    match recipe.arrival_kind:
        case ArrivalKind.GAMMA:
            return Gaps.gamma(cv=cv)
        case ArrivalKind.LOG_NORMAL:
            return Gaps.log_normal(cv=cv)
        case ArrivalKind.REGULAR:
            return Gaps.regular()
        case _:
            return Gaps.poisson()


def _rates(recipe: Recipe, ranks: tuple[int, ...]) -> Rates:
    if recipe.rates is not None:
        with blaming("rates"):
            mix = parse_mix(recipe.rates, least=0)
        assigned = mix.assign(len(ranks), stream(recipe.seed, Purpose.RATES))
        rates_per_s = np.array(assigned, dtype=np.float64)
    else:
        total = recipe.rate or defaults.DEFAULT_RATE_PER_S
        rates_per_s = popularity_of(recipe, ranks).mean_shares() * total
    with blaming("cv"):
        if recipe.change_every_s is None:
            return ConstantRates(rates_per_s=rates_per_s, gaps=_gaps(recipe))
        choices = (Gaps.poisson(), Gaps.log_normal(cv=recipe.cv or defaults.DEFAULT_CV))
    factor = recipe.change_factor or defaults.DEFAULT_CHANGE_FACTOR
    with blaming("change_every_s"):
        return ChangingRates(
            rates_per_s=rates_per_s,
            every_s=recipe.change_every_s,
            factor=factor,
            least_per_s=recipe.rate_least or float(rates_per_s.min()) / factor,
            most_per_s=recipe.rate_most or float(rates_per_s.max()) * factor,
            choices=choices,
        )
