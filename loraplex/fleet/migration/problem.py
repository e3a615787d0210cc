"""The problem that a migration solves: requests, replicas, adapters and the costs of moving them.

The notation of dLoRA (OSDI 2024, section 5.2) is given with each field: L, M^R, M^A, M^G, M^H, gamma, eta.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from loraplex.core.errors import UserError
from loraplex.core.words import plural
from loraplex.perf.line import Line

# About one decode step of a 7B model on an H200. dLoRA gives no value; see docs/decisions.md.
DEFAULT_ETA_S = 0.005

_Name = TypeVar("_Name", bound=Hashable)


class Move(NamedTuple):
    """A request that leaves its replica, to be prefilled again on another one."""

    request_id: Hashable
    source: int
    target: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationRequest:
    """A request that a replica has accepted and not finished.

    `kv_tokens` (M^R): its tokens so far, which its KV cache holds and a move prefills again. `expected_s`
    (L): the seconds of its replica's time that the rest of it will take. In a batch this is its share of each
    step, so that the sum over a replica's requests is the time until the replica has finished them. `stays`:
    it must not leave its replica.
    """

    request_id: Hashable
    adapter: int | None
    replica: int
    kv_tokens: int
    expected_s: float
    stays: bool = False

    def check(self) -> None:
        """Raise UserError if a value is invalid."""
        _require(self.kv_tokens >= 0, f"request {self.request_id} has {self.kv_tokens} KV tokens")
        _require_seconds(self.expected_s, f"the expected time of request {self.request_id}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationReplica:
    """A replica that takes part.

    `kv_capacity_tokens` (M^G): the KV tokens its device holds, shared with adapters that have `kv_tokens`.
    `host_kv_tokens` (M^H): the KV tokens its host has room for, None for no limit; used only by the exact
    program. `adapters`: those on its device. `max_adapters`: the number of adapters it may have requests for,
    None for no limit. `gives` and `receives`: whether requests may leave it, and may be sent to it.
    """

    replica: int
    kv_capacity_tokens: int
    host_kv_tokens: int | None = None
    adapters: frozenset[int] = frozenset()
    max_adapters: int | None = None
    gives: bool = True
    receives: bool = True

    def check(self) -> None:
        """Raise UserError if a value is invalid."""
        name = f"replica {self.replica}"
        _require(self.replica >= 0, f"{name} has a negative number")
        _require(
            self.kv_capacity_tokens > 0,
            f"{name} has room for {self.kv_capacity_tokens} KV tokens; a replica needs room for one at least",
        )
        _require(
            self.host_kv_tokens is None or self.host_kv_tokens >= 0, f"the host of {name} has negative room"
        )
        _require(
            self.max_adapters is None or self.max_adapters > 0,
            f"{name} may hold {self.max_adapters} adapters; leave max_adapters out if there is no limit",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationAdapter:
    """An adapter that some request needs.

    `load_s`: seconds to load it to the device of a replica that has it in host memory. `fetch_s`: seconds
    until it is in the host memory of a replica that has it neither there (`on_host`: the replicas that do)
    nor on its device. `kv_tokens` (M^A): the KV tokens whose memory its weights take; zero if adapters have
    their own memory.
    """

    adapter: int
    load_s: float
    fetch_s: float = 0.0
    on_host: frozenset[int] = frozenset()
    kv_tokens: int = 0

    def check(self) -> None:
        """Raise UserError if a value is invalid."""
        _require(self.adapter >= 0, f"adapter {self.adapter} has a negative number")
        _require(self.kv_tokens >= 0, f"adapter {self.adapter} takes {self.kv_tokens} KV tokens")
        _require_seconds(self.load_s, f"the time to load adapter {self.adapter}")
        _require_seconds(self.fetch_s, f"the time to fetch adapter {self.adapter}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationCosts:
    """The costs of a migration, in seconds of a replica's time.

    `prefill`: seconds to prefill a number of tokens; a request that moves pays it for all its tokens.
    `swap_s_per_token` (1/B): seconds for each KV token beyond the capacity of a replica. `gamma`: factor on
    the execution time of a request that moves; `MigrationFactor` measures it. `eta_s`: seconds for each
    adapter that a replica has requests for; this keeps requests for one adapter together.
    """

    prefill: Line
    swap_s_per_token: float
    gamma: float = 1.0
    eta_s: float = DEFAULT_ETA_S

    def check(self) -> None:
        """Raise UserError if a cost is invalid."""
        _require_seconds(self.prefill.latency_s, "the latency of a prefill")
        _require_seconds(self.prefill.unit_s, "the time to prefill a token")
        _require_seconds(self.swap_s_per_token, "the time to swap a token")
        _require_seconds(self.eta_s, "eta, the time for each adapter of a replica,")
        _require(
            math.isfinite(self.gamma) and self.gamma >= 1,
            f"gamma is {self.gamma:g}; it is time with migration over time without, so 1 at least",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MigrationProblem:
    """Everything that one decision is made from. It validates itself, and raises UserError with a clear
    message."""

    replicas: tuple[MigrationReplica, ...]
    requests: tuple[MigrationRequest, ...]
    costs: MigrationCosts
    adapters: tuple[MigrationAdapter, ...] = ()

    def __post_init__(self) -> None:
        _require(len(self.replicas) > 0, "there are no replicas to migrate between")
        self.costs.check()
        for replica in self.replicas:
            replica.check()
        for adapter in self.adapters:
            adapter.check()
        for request in self.requests:
            request.check()
        replicas = _all_different("replica", (each.replica for each in self.replicas))
        adapters = _all_different("adapter", (each.adapter for each in self.adapters))
        _all_different("request", (each.request_id for each in self.requests))
        for request in self.requests:
            name = f"request {request.request_id}"
            _require(
                request.replica in replicas,
                f"{name} is on replica {request.replica}, which does not take part; "
                f"the {plural('replica', len(replicas))} here: {_listed(replicas)}",
            )
            _require(
                request.adapter is None or request.adapter in adapters,
                f"{name} needs adapter {request.adapter}, of which nothing is known; "
                f"the {plural('adapter', len(adapters))} here: {_listed(adapters)}",
            )


def _all_different(what: str, names: Iterable[_Name]) -> set[_Name]:
    seen: set[_Name] = set()
    for name in names:
        _require(name not in seen, f"{what} {name} is there twice")
        seen.add(name)
    return seen


def _listed(numbers: set[int], most: int = 8) -> str:
    shown = ", ".join(map(str, sorted(numbers)[:most]))
    return f"{shown or 'none'}{', ...' if len(numbers) > most else ''}"


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise UserError(message)


def _require_seconds(value: float, what: str) -> None:
    _require(
        math.isfinite(value) and value >= 0, f"{what} is {value:g} s; it must be zero or more, and finite"
    )
