"""Gives the requests of a workload to tenants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from loraplex.core.tenants import TENANT_NAMES, is_tenant_name
from loraplex.workload.errors import WorkloadError
from loraplex.workload.request import Workload, WorkloadHeader, WorkloadRequest
from loraplex.workload.streams import Purpose, stream

_BATCH: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantMix:
    """Tenants, and the part of the requests that each has, by weights."""

    names: tuple[str, ...]
    weights: tuple[float, ...]


def parse_tenant_mix(text: str) -> TenantMix:
    """Return the mix of a text such as `acme:10,small:1`; a name alone has a weight of 1. Raises
    WorkloadError."""
    names, weights = [], []
    for part in text.split(","):
        name, colon, weight = part.strip().partition(":")
        try:
            value = float(weight) if colon else 1.0
        except ValueError:
            value = -1.0
        if not is_tenant_name(name) or not 0 < value < float("inf"):
            raise WorkloadError(
                f"{part!r} is no tenant with a weight; write them like acme:10,small:1, with names of "
                f"{TENANT_NAMES}"
            )
        if name in names:
            raise WorkloadError(f"tenant {name!r} is given twice")
        names.append(name)
        weights.append(value)
    return TenantMix(names=tuple(names), weights=tuple(weights))


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantedWorkload:
    """The same requests, each of a tenant drawn by the weights."""

    requests: Workload
    mix: TenantMix
    seed: int

    @property
    def header(self) -> WorkloadHeader | None:
        return self.requests.header

    def __iter__(self) -> Iterator[WorkloadRequest]:
        rng, mix = stream(self.seed, Purpose.TENANTS), self.mix
        total = sum(mix.weights)
        parts = [weight / total for weight in mix.weights]
        drawn: list[int] = []
        for request in self.requests:
            if not drawn:
                drawn = rng.choice(len(parts), size=_BATCH, p=parts).tolist()
            yield replace(request, tenant=mix.names[drawn.pop()])
