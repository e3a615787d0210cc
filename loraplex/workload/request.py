"""A workload: requests in order of arrival, and a header about their adapters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from loraplex.core.tenants import NO_TENANT
from loraplex.workload.errors import WorkloadError

Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadRequest:
    """One request. `arrival_s` counts from the start of the replay. `tenant`: whose it is, if anybody's."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    adapter: int
    tenant: str = NO_TENANT


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadHeader:
    """Facts about all requests; adapter i has rank `ranks[i]`.

    `duration_s` is how long requests are offered, at least the time of the last one. `recipe` holds the
    options the workload was made with, for people.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...] | None = None
    duration_s: float | None = None
    recipe: Mapping[str, Scalar] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.ranks:
            raise WorkloadError("ranks: there must be at least one adapter")
        if bad := [rank for rank in self.ranks if rank < 1]:
            raise WorkloadError(f"ranks: a rank must be at least 1, not {bad[0]}")
        if self.names is not None and len(self.names) != len(self.ranks):
            raise WorkloadError(f"names: there are {len(self.names)} for {len(self.ranks)} ranks")
        if self.duration_s is not None and not 0 < self.duration_s < math.inf:
            raise WorkloadError(f"duration_s must be finite and more than 0, not {self.duration_s}")

    @property
    def num_adapters(self) -> int:
        return len(self.ranks)


@runtime_checkable
class Workload(Protocol):
    """Requests that can be iterated any number of times, with equal results, without holding all in memory.

    `header` is None for a file without one: its adapter indices are taken modulo the number in use.
    """

    @property
    def header(self) -> WorkloadHeader | None: ...

    def __iter__(self) -> Iterator[WorkloadRequest]: ...
