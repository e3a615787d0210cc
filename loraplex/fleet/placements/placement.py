"""The problem that a placement solves, and the protocol that every policy follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from loraplex.core.arrays import FloatArray
from loraplex.core.errors import UserError
from loraplex.core.words import plural
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacementProblem:
    """A fleet of identical replicas to place adapters on. Problems that no policy can solve are refused
    here."""

    adapters: AdapterSizes
    num_replicas: int
    demand: FloatArray
    """Expected tokens/s of each adapter in the next period, prompt and output."""
    host_bytes: int | None = None
    """Bytes for adapters in the host memory of each replica; None for no limit."""
    device_bytes: int | None = None
    """Bytes for adapters and KV cache on the device of each replica; None for no limit."""
    num_slots: int | None = None
    """Number of adapter slots of each replica; None if adapters take memory by their size."""
    previous: Plan | None = None
    """The plan of the previous period. It may lack adapters that were added since."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_replicas < 1:
            raise UserError(
                f"a fleet of {self.num_replicas} replicas serves no adapter; it needs at least one replica"
            )
        self._check_demand()
        if self.host_bytes is not None:
            self._check_host_bytes(self.host_bytes)
        if self.previous is not None:
            self.previous.check_known(len(self.adapters), self.num_replicas)

    def _check_demand(self) -> None:
        if self.demand.shape != (len(self.adapters),):
            raise UserError(
                f"the demand of {self.demand.size} adapters is given, but the fleet has {len(self.adapters)} "
                f"{plural('adapter', len(self.adapters))}"
            )
        wrong = np.flatnonzero(~(np.isfinite(self.demand) & (self.demand >= 0)))
        if wrong.size:
            raise UserError(
                f"adapter {wrong[0]} has a demand of {self.demand[wrong[0]]:g} tokens/s; it must be a number "
                "from 0 on"
            )

    def _check_host_bytes(self, host_bytes: int) -> None:
        num_bytes = self.adapters.num_bytes
        too_large = np.flatnonzero(num_bytes > host_bytes)
        if too_large.size:
            largest = int(num_bytes.argmax())
            raise UserError(
                f"adapter {largest} takes {num_bytes[largest]:,} bytes, {num_bytes[largest] - host_bytes:,} "
                f"more than the {host_bytes:,} bytes of host memory that a replica has for adapters"
            )
        needed_bytes, held_bytes = int(num_bytes.sum()), host_bytes * self.num_replicas
        if needed_bytes > held_bytes:
            raise UserError(
                f"{len(self.adapters)} adapters take {needed_bytes:,} bytes, {needed_bytes - held_bytes:,} "
                f"more than the {held_bytes:,} bytes of host memory that {self.num_replicas} "
                f"{plural('replica', self.num_replicas)} have for adapters; give more --replicas"
            )


class Placement(Protocol):
    """A policy that decides which replicas serve which adapters."""

    def place(self, problem: PlacementProblem) -> Plan:
        """Return a plan for all adapters, within the host memory of every replica.

        Modifies none of its arguments, and returns the same for the same problem. Raises UserError for a
        problem that the policy cannot place."""
        ...
