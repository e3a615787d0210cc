"""How a fleet is made: its replicas, its policy, and how patient it is with them."""

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
"""Longer than a connection to a machine that is gone is waited for, which has a reason of its own."""


@dataclass(frozen=True, kw_only=True)
class FleetSetup:
    """How the replicas of a fleet are made. `make`: the replica of this number, not started yet. `limits`: of
    one that is ready. `period_s`: of the policy's placement. `costs`: of any of them, as a profile, where
    they do not say it themselves. `most`: how many there can be, and why (None if nothing but good sense
    limits them). `no_restart`: why a replica cannot be restarted on demand, and what to do instead; None if
    it can. `num_loads_at_once`: adapters that one which joins is given at a time. `may_lack`: replicas are
    servers that others start: the fleet starts without those that cannot be used, if one can, and goes on
    trying them. `rest_s`: so long after the first one can be used, it does not wait for the others any more.
    `look`: raises LoraplexError unless the replica of this number could start; asked before one is tried
    again, as starts wait for each other and this need not. `retry_s`: the pause before one that has failed is
    tried again, and the longest. `clock`: that periods go by."""

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
    """Return what tells the limits of an engine process with these options, once it is ready."""

    def limits(info: Ready) -> Limits:
        assert info.num_kv_blocks is not None, "an engine process tells it"
        return Limits(
            max_running=engine.max_running, kv_tokens=max(info.num_kv_blocks * engine.block_size, 1)
        )

    return limits
