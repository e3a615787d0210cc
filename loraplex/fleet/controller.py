"""The fleet's controller: it keeps the view up to date, routes requests, and places adapters every period.

Backends (a simulation, processes, servers elsewhere) report what happens and carry out the decisions. The
controller has no clock: every call passes the time.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple, Protocol

from loraplex.core.errors import UserError
from loraplex.core.tenants import NO_TENANT
from loraplex.core.words import plural
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.migration.fleet_view import FleetMigrationView
from loraplex.fleet.migration.migrate import Migrator
from loraplex.fleet.migration.migration_factor import MigrationFactor
from loraplex.fleet.migration.problem import Move
from loraplex.fleet.plan import Plan
from loraplex.fleet.pool import AdapterPool, Drop, Fetch
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Router
from loraplex.fleet.view import FleetView
from loraplex.perf.line import Line


class Planner(Protocol):
    """Decides periodically where adapters are placed."""

    period_s: float

    def count(self, adapter: int, num_tokens: int) -> None:
        """Record that a request for an adapter had this many tokens."""
        ...

    def place(self, previous: Plan | None, *, since_s: float, now_s: float) -> Plan | None:
        """Return the plan for the period that begins now; None for every adapter everywhere. `since_s`: start
        of the period whose tokens were counted; now for the first plan."""
        ...


class Decisions(NamedTuple):
    """The decisions that a backend carries out: copies of adapters that are dropped, requests that move."""

    drops: list[Drop]
    moves: list[Move]


class Controller:
    """Turns reports of a fleet into decisions: where requests go, where adapters are placed, what moves.

    `pool`: the directory of the adapters in host memory; None if replicas read them from disk.
    """

    def __init__(
        self,
        *,
        adapters: AdapterSizes,
        view: FleetView,
        router: Router,
        planner: Planner | None = None,
        shares_adapters: bool = False,
        host_bytes: int | None = None,
        migrator: Migrator | None = None,
        now_s: float | None = None,
    ) -> None:
        """`planner`: None to serve every adapter everywhere. `shares_adapters`: replicas copy adapters from
        each other's host memory, of which each has `host_bytes` for adapters (None: no limit). `migrator`:
        None to leave requests where they are. `now_s`: time when the fleet begins to serve; None if `begin`
        is called later, by a backend that does not know that time yet.

        Raises UserError for a first plan that does not fit the fleet.
        """
        self.view = view
        self._adapters = adapters
        self._ranks: list[int] = adapters.ranks.tolist()
        self._router = router
        self._planner = planner
        self._migrator = migrator
        self._factor = MigrationFactor()
        # Costs when migration was last decided.
        self._prefill = Line(latency_s=0.0, unit_s=0.0)
        self._output_token_s = 0.0
        self._down: set[int] = set()
        self.shares_adapters: Final = shares_adapters
        self._host_bytes = host_bytes
        self.pool: AdapterPool | None = None
        # The period whose tokens the planner counts: its start, and when the next plan is due.
        self._since_s: float | None = None
        self._place_s = math.inf
        self._has_counts = False  # the planner has counted tokens since the last plan
        if now_s is not None:
            self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """Make the first plan, put adapters where it places them, and begin the first period.

        Raises UserError for a plan that does not fit the fleet.
        """
        assert self._since_s is None, "the fleet serves already"
        if self._planner is not None:
            self._place(self._planner, since_s=now_s, now_s=now_s)
        self._begin_periods(now_s)
        if self.shares_adapters:
            adapters, load, tiers = self._adapters, self.view.load, self.view.tiers
            self.pool = AdapterPool(adapters, load.num_replicas, self.view.plan, self._host_bytes)
            for adapter in range(len(adapters)):
                for replica in self.pool.holders(adapter):
                    tiers.staged(replica, adapter)

    def _begin_periods(self, now_s: float) -> None:
        self._since_s = now_s
        if self._planner is not None:
            self._place_s = now_s + self._planner.period_s
        if self._migrator is not None:
            self._migrator.begin(now_s)

    def route(
        self,
        request_id: Hashable,
        adapter: int | None,
        prompt_tokens: int,
        output_tokens: int | None = None,
        tenant: str = NO_TENANT,
    ) -> int:
        """Return the replica that serves a request, to whose load it belongs from now on. `output_tokens`:
        the length of its answer, if known. `tenant`: whose it is.

        Raises UserError for an adapter that the fleet does not have, and CapacityError while no replica
        accepts requests.
        """
        request = self.request_of(adapter, prompt_tokens, output_tokens, tenant)
        assert self._since_s is not None, "the fleet has not begun to serve"
        replica = self._router.choose(request, self.view)
        self.view.load.sent(request_id, request, replica)
        if adapter is not None:
            if self.pool is not None:
                self.pool.used(replica, adapter)
            self._count(adapter, prompt_tokens)
        return replica

    def request_of(
        self,
        adapter: int | None,
        prompt_tokens: int,
        output_tokens: int | None = None,
        tenant: str = NO_TENANT,
    ) -> RoutedRequest:
        """Return a request as routers see it. Raises UserError for an adapter that the fleet does not
        have."""
        if adapter is None:
            return RoutedRequest(None, 0, prompt_tokens, output_tokens, tenant)
        _check_known("adapter", adapter, len(self._ranks))
        return RoutedRequest(adapter, self._ranks[adapter], prompt_tokens, output_tokens, tenant)

    def would_choose(self, request: RoutedRequest) -> int:
        """Return the replica that a request would be sent to now, without changing anything. Raises
        CapacityError while no replica accepts requests."""
        # A copy of the router decides, because routers keep state; what they only read is not copied.
        known = {id(each): each for each in (self.view.costs, self.view.plan)}
        return copy.deepcopy(self._router, known).choose(request, self.view)

    def _count(self, adapter: int, num_tokens: int) -> None:
        if self._planner is not None:
            self._planner.count(adapter, num_tokens)
            self._has_counts = math.isfinite(self._place_s)

    def first_token(self, request_id: Hashable) -> None:
        self.view.load.first_token(request_id)

    def ended(self, request_id: Hashable, output_tokens: int | None) -> None:
        """Record the end of a request. `output_tokens`: None if it failed."""
        request = self.view.load.ended(request_id, output_tokens)
        if output_tokens is None:
            return
        if request.adapter is not None:
            self._count(request.adapter, output_tokens)
        self._factor.record_execution(output_tokens * self._output_token_s)

    def drain(self, replica: int) -> None:
        """Send a replica no more requests. It finishes those it has, and others may still copy adapters from
        its host memory."""
        self._accept(replica, accepts=False)

    def down(self, replica: int) -> None:
        """Send a replica no more requests, and copy adapters from it only if no other replica has them. The
        backend reports the end of its requests. Its copies stay in the directory, as it is expected to come
        back."""
        self._accept(replica, accepts=False)
        self._down.add(replica)

    def up(self, replica: int) -> None:
        """Send requests again to a replica that was down or drained."""
        self._accept(replica, accepts=True)
        self._down.discard(replica)

    def _accept(self, replica: int, *, accepts: bool) -> None:
        _check_known("replica", replica, self.view.load.num_replicas)
        self.view.load.accepts[replica] = accepts

    def fetch(self, replica: int, adapter: int, free_at_s: Callable[[int], float]) -> Fetch:
        """Decide from where a replica copies an adapter that it does not hold: from the holder that can send
        soonest (`free_at_s`), and from one that is down only if all are. Copies that are dropped to make room
        leave the directory."""
        assert self.pool is not None, "adapters are not shared"
        fetch = self.pool.fetch(
            replica,
            adapter,
            lambda source: math.inf if source in self._down else free_at_s(source),
            self._in_use,
        )
        self._let_go(fetch.drops)
        return fetch

    def _in_use(self, replica: int, adapter: int) -> bool:
        return replica in self.view.load.in_flight(adapter)

    def fetched(self, replica: int, adapter: int) -> list[Drop]:
        """Record that a replica has a complete copy of an adapter; return the copies that are dropped."""
        assert self.pool is not None, "adapters are not shared"
        return self._let_go(self.pool.fetched(replica, adapter))

    def moved(self, request_id: Hashable, replica: int, num_output: int) -> None:
        """Record that a move was carried out: a request continues elsewhere, with `num_output` output tokens
        so far from all replicas that it was on."""
        load = self.view.load
        load_s = self._load_s(load.request(request_id), replica)
        request = load.moved(request_id, replica, num_output)
        if self.pool is not None and request.adapter is not None:
            self.pool.used(replica, request.adapter)
        self._factor.record_migration(self._prefill.seconds(request.prompt_tokens) + load_s)

    def _load_s(self, request: RoutedRequest, replica: int) -> float:
        """Return the seconds of the load that a request causes on a replica; zero if the replica has requests
        for the adapter, which is loaded for them anyway."""
        load, adapter = self.view.load, request.adapter
        if adapter is None or replica in load.in_flight(adapter):
            return 0.0
        return float(self.view.load_s(request, load.replicas)[replica])

    @property
    def next_tick_s(self) -> float:
        """The next time in seconds at which `tick` has something to decide."""
        return self._place_s if self._migrator is None else min(self._place_s, self._migrator.due_s)

    @property
    def is_idle(self) -> bool:
        """Return whether no tick has anything to decide until a request arrives: there are no requests, and
        earlier ones are accounted for in the last plan."""
        return self.view.load.is_empty and not self._has_counts

    def idle_until(self, now_s: float) -> None:
        """Skip the time in which the fleet was idle: all periods begin again now. The plan and its inputs
        stay, as there were no requests since."""
        assert self.is_idle
        self._begin_periods(now_s)

    def may_migrate(self, now_s: float) -> bool:
        """Return whether `tick` will look at single requests, which must be up to date for that."""
        return self._migrator is not None and self._migrator.due_s <= now_s

    def tick(self, now_s: float, num_output: Callable[[Hashable], int | None]) -> Decisions:
        """Place adapters again and migrate requests, each if its period has ended.

        A late tick places once, by the demand since the last plan, and the next period begins now.

        `num_output`: returns the output tokens of a request so far, on all replicas that it was on; None if
        it has ended. Raises UserError for a plan that does not fit the fleet.
        """
        drops: list[Drop] = []
        if self._planner is not None and self._since_s is not None and self._place_s <= now_s:
            drops = self._place(self._planner, since_s=self._since_s, now_s=now_s)
            self._since_s, self._place_s = now_s, now_s + self._planner.period_s
        return Decisions(drops, self._migrations(now_s, num_output))

    def _migrations(self, now_s: float, num_output: Callable[[Hashable], int | None]) -> list[Move]:
        if self._migrator is None or not self.may_migrate(now_s):
            return []
        view = FleetMigrationView(self.view, num_output, self._factor.gamma)
        self._prefill, self._output_token_s = view.costs.prefill, view.output_token_s
        return self._migrator.decide(now_s, view)

    def _place(self, planner: Planner, *, since_s: float, now_s: float) -> list[Drop]:
        plan = planner.place(self.view.plan, since_s=since_s, now_s=now_s)
        if plan is not None and plan is not self.view.plan:
            plan.check(len(self._ranks), self.view.load.num_replicas)
        self.view.plan = plan
        self._has_counts = False
        return [] if self.pool is None else self._let_go(self.pool.placed(plan))

    def _let_go(self, drops: list[Drop]) -> list[Drop]:
        for replica, adapter in drops:
            self.view.tiers.dropped(replica, adapter)
        return drops


def _check_known(kind: str, number: int, num_known: int) -> None:
    if not 0 <= number < num_known:
        raise UserError(
            f"there is no {kind} {number}: the fleet has {num_known} {plural(kind, num_known)}, numbered "
            "from 0"
        )
