"""The controller of a live fleet: adapters and replicas come and go while requests are routed.

Its plan, token counts and periods persist through these changes. `decide` replaces `tick`: it is given which
replicas serve, so that the adapters of a lost replica are placed elsewhere at once, and a replica that joins
gets its share. A plan takes effect as described in `plan_change`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.controller import Controller
from loraplex.fleet.load import ReplicaLimits
from loraplex.fleet.migration.migrate import Migrator
from loraplex.fleet.migration.migration_factor import MigrationFactor
from loraplex.fleet.migration.problem import Move
from loraplex.fleet.plan import Entry, Plan
from loraplex.fleet.plan_change import Pending, PlanChange, Stage
from loraplex.fleet.replanner import Counted, Replanner
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.routers.router import Router
from loraplex.fleet.view import FleetView
from loraplex.perf.line import Line


class LiveDecisions(NamedTuple):
    """The decisions that a backend carries out: adapters that replicas load, requests that move."""

    stages: list[Stage]
    moves: list[Move]


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """Everything that a controller remembers in addition to its view. `target`: the latest plan, which the
    view's plan turns into. `is_given_pending`: `given` has changed since that plan."""

    since_s: float
    place_s: float
    has_counts: bool
    serving: frozenset[int]
    plan: Plan | None
    target: Plan | None
    pending: Mapping[int, Pending]
    counted: Counted | None
    given: Mapping[int, Entry]
    is_given_pending: bool
    migrate_s: float | None
    moved_s: Mapping[Hashable, float]
    executed_s: tuple[float, float]
    prefill: Line
    output_token_s: float


class LiveController(Controller):
    """Begins without adapters, and makes its first plan with the first `decide`."""

    def __init__(
        self,
        *,
        view: FleetView,
        router: Router,
        planner: Replanner | None,
        migrator: Migrator | None,
        now_s: float,
    ) -> None:
        super().__init__(
            adapters=AdapterSizes.of(ranks=(), num_bytes=()),
            view=view,
            router=router,
            planner=planner,
            migrator=migrator,
        )
        self._replanner = planner
        self._change = PlanChange(self._has)
        self._serving: frozenset[int] = frozenset()
        self._is_complete = True  # no adapter was added since the last plan
        self._is_given_pending = False  # the given entries have changed since the last plan
        self.target: Plan | None = None
        self._begin_periods(now_s)

    # ---- adapters and replicas that come and go

    def add_adapters(self, added: AdapterSizes) -> None:
        """Add adapters, which get the next numbers. Until they are placed, every replica may serve them."""
        self._adapters = self._adapters.followed_by(added)
        self._ranks += added.ranks.tolist()
        self._is_complete = False
        if self._replanner is not None:
            self._replanner.add_adapters(added)
        if self.view.plan is not None:
            num_replicas = self.view.load.num_replicas
            anywhere = Entry(tuple(range(num_replicas)), (1 / num_replicas,) * num_replicas)
            self.view.plan = Plan.of_entries([*self.view.plan.entries(), *[anywhere] * len(added)])

    def remove_adapter(self, adapter: int) -> None:
        """Remove an adapter from all placements. Requests in flight for it continue."""
        self._change.forget(adapter)
        if self._replanner is not None:
            self._replanner.remove_adapter(adapter)

    def restore_adapter(self, adapter: int) -> None:
        """Serve an adapter again that was removed."""
        self._is_complete = False
        if self._replanner is not None:
            self._replanner.restore_adapter(adapter)

    def join(self, replica: int, limits: ReplicaLimits) -> None:
        """Add a replica, or put a new one in place of one that has left."""
        self.view.load = self.view.load.with_replica(replica, limits)
        self._serving -= {replica}

    # ---- a placement that is given

    @property
    def has_placement(self) -> bool:
        """Return whether adapters are placed at all; otherwise every replica serves all of them."""
        return self._replanner is not None

    @property
    def given(self) -> Mapping[int, Entry]:
        """The entries that are given, by adapter."""
        return {} if self._replanner is None else self._replanner.given

    def give(self, given: Mapping[int, Entry]) -> None:
        """Keep these entries from the next `decide` on, instead of those of the policy's placement (see
        `Replanner.give`). With none, the policy places all adapters again."""
        assert self._replanner is not None, "a fleet without a placement cannot be given one"
        self._replanner.give(given)
        self._is_given_pending = True

    # ---- decisions

    def send(self, request_id: Hashable, request: RoutedRequest, replica: int) -> None:
        """Count a request as the load of a replica that it moves to. Its `prompt_tokens` include its output
        so far. The planner counted its tokens when it arrived."""
        load_s = self._load_s(request, replica)
        self.view.load.sent(request_id, request, replica)
        self._factor.record_migration(self._prefill.seconds(request.prompt_tokens) + load_s)

    def has_to_decide(self, now_s: float, serving: Set[int]) -> bool:
        """Return whether `decide` has anything to do now."""
        if self.next_tick_s <= now_s:
            return True
        is_planned = self._is_complete and not self._is_given_pending and self._serving == serving
        return self._replanner is not None and not is_planned

    def decide(
        self, now_s: float, num_output: Callable[[Hashable], int | None], serving: Iterable[int]
    ) -> LiveDecisions:
        """Place adapters if the period is over, if replicas joined, or if an adapter has no serving replica;
        migrate requests if it is time. `serving`: the replicas that take requests now. `num_output`: see
        `tick`.

        While no replica serves, nothing is decided. Raises UserError for a plan that does not fit the fleet.
        """
        now_serving = frozenset(serving)
        if not now_serving:
            return LiveDecisions([], [])
        if self.next_tick_s <= now_s and self.is_idle:
            self.idle_until(now_s)
        load = self.view.load
        load.accepts[:] = [replica in now_serving for replica in range(load.num_replicas)]
        stages = [] if self._replanner is None else self._plan(self._replanner, now_s, now_serving)
        return LiveDecisions(stages, self._migrations(now_s, num_output))

    def _plan(self, planner: Replanner, now_s: float, serving: frozenset[int]) -> list[Stage]:
        before, since_s = self.target, self._since_s
        assert since_s is not None
        has_joined = not serving <= self._serving
        planner.serve(serving, self.view.load.num_replicas)
        if before is None:
            plan = planner.place(None, since_s=now_s, now_s=now_s)
        elif self._place_s <= now_s:
            plan = planner.place(before, since_s=since_s, now_s=now_s)
            self._since_s, self._place_s = now_s, now_s + planner.period_s
            self._has_counts = False
        elif has_joined or (self._is_given_pending and not planner.given):
            plan = planner.place_again(before)
        else:
            plan = planner.mended(before)
        plan.check(len(self._ranks), self.view.load.num_replicas)
        self._serving, self._is_complete, self.target = serving, True, plan
        self._is_given_pending = False
        if self.view.plan is None:  # the first plan: no replica holds an adapter before it
            self.view.plan = plan
            return []
        self.view.plan, stages = self._change.begin(self.view.plan, plan, serving)
        return stages

    def staged(self, replica: int, adapter: int, *, is_there: bool) -> None:
        """Record that a replica has loaded an adapter, or could not."""
        if self.view.plan is not None:
            stage = Stage(replica, adapter)
            self.view.plan = self._change.staged(self.view.plan, stage, is_there=is_there)

    def wants(self, replica: int, adapter: int) -> bool:
        """Return whether a replica should have an adapter, by the present plan or the one taking effect."""
        pending, plan = self._change.pending.get(adapter), self.view.plan
        if pending is not None and replica in pending.waiting:
            return True
        return plan is not None and replica in plan.replicas[adapter]

    def waiting(self, adapter: int) -> Set[int]:
        """Return the replicas that an adapter's next entry waits for."""
        pending = self._change.pending.get(adapter)
        return frozenset() if pending is None else pending.waiting

    def _has(self, replica: int, adapter: int) -> bool:
        tiers = self.view.tiers
        return replica in tiers.on_host(adapter) or replica in tiers.on_device(adapter)

    # ---- saved state

    def state(self) -> ControllerState:
        """Return the state that a controller with the same adapters, replicas and view can continue from."""
        assert self._since_s is not None
        migrator = self._migrator
        return ControllerState(
            since_s=self._since_s,
            place_s=self._place_s,
            has_counts=self._has_counts,
            serving=self._serving,
            plan=self.view.plan,
            target=self.target,
            pending=self._change.pending,
            counted=None if self._replanner is None else self._replanner.counted,
            given=self.given,
            is_given_pending=self._is_given_pending,
            migrate_s=None if migrator is None else migrator.due_s,
            moved_s={} if migrator is None else migrator.moved_s,
            executed_s=self._factor.recorded_s,
            prefill=self._prefill,
            output_token_s=self._output_token_s,
        )

    def restore(self, state: ControllerState) -> None:
        """Continue from another controller's state."""
        self._since_s, self._place_s, self._has_counts = state.since_s, state.place_s, state.has_counts
        self._serving = state.serving
        self.view.plan, self.target = state.plan, state.target
        self._is_complete = self.target is not None and len(self.target.replicas) == len(self._ranks)
        self._change.restore(state.pending)
        if self._replanner is not None:
            if state.serving:
                self._replanner.serve(state.serving, self.view.load.num_replicas)
            if state.counted is not None:
                self._replanner.restore(state.counted)
            self._replanner.give(state.given)
            self._is_given_pending = state.is_given_pending
        if self._migrator is not None and state.migrate_s is not None:
            self._migrator.restore(state.migrate_s, state.moved_s)
        self._factor = MigrationFactor(*state.executed_s)
        self._prefill, self._output_token_s = state.prefill, state.output_token_s
