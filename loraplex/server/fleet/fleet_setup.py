"""The setup of a fleet: its replicas, its policy, and its timeouts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from loraplex.core.clock import Clock, MonotonicClock
from loraplex.engine.options import EngineOptions
from loraplex.fleet.policy import Policy
from loraplex.fleet.replanner import PERIOD_S
from loraplex.perf.cost_model import CostModel
from loraplex.server.fleet.revival import RETRY_S
from loraplex.server.fleet.routing_events import Limits
from loraplex.server.protocol_ipc import Ready
from loraplex.server.replica import Replica

MAX_REPLICAS: Final = 64
_REST_S: Final = 5.0
"""Seconds to wait for the rest; longer than the connect timeout, whose error says more."""


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """The parameters of a fleet and its replicas.

    - `make`: creates the replica with this number, not started yet.
    - `limits`: returns the limits of a replica that is ready.
    - `period_s`: period of the policy's placement in seconds.
    - `costs`: profile of any replica, used if they do not report one.
    - `most`: the largest possible number of replicas, and why; None for the general limit.
    - `no_restart`: why a replica cannot be restarted on demand, and what to do instead; None if it can.
    - `num_loads_at_once`: adapters that a joining replica is given concurrently.
    - `may_lack`: replicas are servers started by others: the fleet starts without those that cannot be used,
      if at least one can, and keeps trying them.
    - `rest_s`: seconds to wait for the other replicas after the first one can be used.
    - `look`: raises LoraplexError unless the replica with this number could start; called before a retry,
      because starts are serialized and this is not.
    - `retry_s`: the first and the longest pause in seconds before a failed replica is tried again.
    - `clock`: the clock for periods.
    """

    make: Callable[[int], Replica]
    limits: Callable[[Ready], Limits]
    policy: Policy
    costs: CostModel
    most: tuple[int, str] | None = None
    no_restart: str | None = None
    period_s: float = PERIOD_S
    num_loads_at_once: int = 4
    may_lack: bool = False
    rest_s: float = _REST_S
    look: Callable[[int], Awaitable[None]] | None = None
    retry_s: tuple[float, float] = RETRY_S
    clock: Clock = field(default_factory=MonotonicClock)


def limits_of(engine: EngineOptions) -> Callable[[Ready], Limits]:
    """Return a function that computes the limits of an engine process with these options, once it is
    ready."""

    def limits(info: Ready) -> Limits:
        assert info.num_kv_blocks is not None, "an engine process tells it"
        return Limits(
            max_running=engine.max_running, kv_tokens=max(info.num_kv_blocks * engine.block_size, 1)
        )

    return limits
