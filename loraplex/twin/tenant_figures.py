"""The figures of each tenant in a simulated run, and how fairly the service was divided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from loraplex.core.tenants import TenantPolicy
from loraplex.twin.outcome import Outcome, RequestOutcome
from loraplex.twin.slo import Slo

_OUTPUT_WEIGHT: Final = 2.0
"""Service is counted in tokens: one for each of a prompt, two for each of an answer, as in the VTC paper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantFigures:
    """One tenant's requests. `demand`, `service`: of all of them, and of those that were served.
    `goodput_rps`: served within the SLO, per second; `attainment`: their share of all requests."""

    num_requests: int
    num_served: int
    num_refused: int
    share: float
    demand: float
    service: float
    goodput_rps: float
    attainment: float
    ttft_p95_s: float | None


def tenant_figures(
    requests: Iterable[RequestOutcome],
    policies: Iterable[TenantPolicy],
    *,
    duration_s: float,
    slo: Slo,
) -> dict[str, TenantFigures]:
    """Return the figures of each tenant that has requests. `slo`: of those that have none of their own."""
    rights = {each.name: each for each in policies}
    by_tenant: dict[str, list[RequestOutcome]] = {}
    for request in requests:
        by_tenant.setdefault(request.request.tenant, []).append(request)
    return {
        tenant: _figures(own, rights.get(tenant) or TenantPolicy(name=tenant), duration_s, slo)
        for tenant, own in sorted(by_tenant.items())
    }


def _figures(
    own: Sequence[RequestOutcome], policy: TenantPolicy, duration_s: float, slo: Slo
) -> TenantFigures:
    if policy.slo_ttft is not None or policy.slo_tpt is not None:
        slo = Slo(ttft_s=policy.slo_ttft, tpot_s=policy.slo_tpt)
    served = [each for each in own if each.is_served]
    waits_s = [each.ttft_s for each in own if each.ttft_s is not None]
    num_attained = sum(map(slo.is_attained, own))
    return TenantFigures(
        num_requests=len(own),
        num_served=len(served),
        num_refused=sum(each.refused for each in own),
        share=policy.share,
        demand=sum(map(_cost, own)),
        service=sum(map(_cost, served)),
        goodput_rps=num_attained / duration_s if duration_s else 0.0,
        attainment=num_attained / len(own),
        ttft_p95_s=float(np.percentile(waits_s, 95)) if waits_s else None,
    )


def _cost(request: RequestOutcome) -> float:
    return request.request.prompt_tokens + _OUTPUT_WEIGHT * request.request.output_tokens


def fair_parts(demands: Sequence[float], shares: Sequence[float], total: float) -> list[float]:
    """Divide `total` by weighted max-min fairness: nobody gets more than its demand, and what some leave is
    divided among the others in proportion to their shares."""
    parts = [0.0] * len(demands)
    wanting = {number for number, demand in enumerate(demands) if demand > 0}
    left = total
    while wanting:
        level = left / sum(shares[number] for number in wanting)
        sated = {number for number in wanting if demands[number] <= level * shares[number]}
        if not sated:
            for number in wanting:
                parts[number] = level * shares[number]
            return parts
        for number in sated:
            parts[number] = demands[number]
            left -= demands[number]
        wanting -= sated
    return parts


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all values are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return 1.0 if squares == 0 else sum(values) ** 2 / (len(values) * squares)


def fairness(figures: Mapping[str, TenantFigures]) -> float:
    """Return Jain's index of what tenants got of the parts that were fair, given the service that there was
    and what each asked for."""
    rows = list(figures.values())
    total = sum(each.service for each in rows)
    parts = fair_parts([each.demand for each in rows], [each.share for each in rows], total)
    return jain([each.service / part for each, part in zip(rows, parts, strict=True) if part > 0])


def summary_of(
    outcome: Outcome, policies: Sequence[TenantPolicy], max_ttft_s: float | None
) -> dict[str, Any]:
    """Return the figures of tenants as JSON has them; nothing for a run without tenants. `max_ttft_s`: the
    SLO of tenants without one."""
    if not policies and not any(each.request.tenant for each in outcome.requests):
        return {}
    figures = tenant_figures(
        outcome.requests, policies, duration_s=outcome.duration_s, slo=Slo(ttft_s=max_ttft_s)
    )
    return {"jain": fairness(figures), "tenants": {name: asdict(each) for name, each in figures.items()}}
