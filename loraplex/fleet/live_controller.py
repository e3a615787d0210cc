"""The controller of a fleet that serves: adapters and replicas come and go while requests are routed.

Its plan, the tokens that it has counted and its periods stay over all of that. `decide` takes the place of
`tick`: it says which replicas serve, so that adapters of one that is gone get a place elsewhere at once, and
one that joins gets its share. A plan takes effect as `plan_change` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from loraplex.fleet.adapter_table import AdapterTable
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
    """The decisions that a backend carries out: adapters that replicas bring in, requests that move."""

    stages: list[Stage]
    moves: list[Move]


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerState:
    """All that a controller remembers beside its view. `target`: the plan that was decided last, which the
    view's becomes."""

    since_s: float
    place_s: float
    has_counts: bool
    serving: frozenset[int]
    plan: Plan | None
    target: Plan | None
    pending: Mapping[int, Pending]
    counted: Counted | None
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
            adapters=AdapterTable.of(ranks=(), num_bytes=()),
            view=view,
            router=router,
            planner=planner,
            migrator=migrator,
        )
        self._replanner = planner
        self._change = PlanChange(self._has)
        self._serving: frozenset[int] = frozenset()
        self._is_complete = True  # no adapter was added since the last plan
        self.target: Plan | None = None
        self._begin_periods(now_s)

    # ---- adapters and replicas that come and go

    def add_adapters(self, added: AdapterTable) -> None:
        """Serve more adapters, which have the next numbers. Until they are placed every replica may."""
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
        """Place an adapter nowhere any more. Requests for it that are there go on."""
        self._change.forget(adapter)
        if self._replanner is not None:
            self._replanner.remove_adapter(adapter)

    def restore_adapter(self, adapter: int) -> None:
        """Serve an adapter again that was removed."""
        self._is_complete = False
        if self._replanner is not None:
            self._replanner.restore_adapter(adapter)

    def join(self, replica: int, limits: ReplicaLimits) -> None:
        """Have one replica more, or another one in the place of a replica that has left."""
        self.view.load = self.view.load.with_replica(replica, limits)
        self._serving -= {replica}

    # ---- decisions

    def send(self, request_id: Hashable, adapter: int | None, prompt_tokens: int, replica: int) -> None:
        """Count a request as the load of a replica that it moves to. `prompt_tokens`: with its answer so far.
        Its tokens were counted when it came."""
        request = RoutedRequest(adapter, 0 if adapter is None else self._ranks[adapter], prompt_tokens)
        load_s = self._load_s(request, replica)
        self.view.load.sent(request_id, request, replica)
        self._factor.record_migration(self._prefill.seconds(prompt_tokens) + load_s)

    def has_to_decide(self, now_s: float, serving: Set[int]) -> bool:
        """Tell whether `decide` has anything to do now."""
        if self.next_tick_s <= now_s:
            return True
        return self._replanner is not None and not (self._is_complete and self._serving == serving)

    def decide(
        self, now_s: float, num_output: Callable[[Hashable], int | None], serving: Iterable[int]
    ) -> LiveDecisions:
        """Place adapters if the period is over, if replicas joined, or where an adapter has no replica that
        serves; let requests migrate if it is time. `serving`: the replicas that take requests now.
        `num_output`: see `tick`.

        While no replica serves nothing is decided. Raises UserError for a plan that does not fit the fleet.
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
        elif has_joined:
            plan = planner.place_again(before)
        else:
            plan = planner.mended(before)
        plan.check(len(self._ranks), self.view.load.num_replicas)
        self._serving, self._is_complete, self.target = serving, True, plan
        if self.view.plan is None:  # the first one, before which nobody held anything
            self.view.plan = plan
            return []
        self.view.plan, stages = self._change.begin(self.view.plan, plan, serving)
        return stages

    def staged(self, replica: int, adapter: int, *, is_there: bool) -> None:
        """Record that a replica has brought in an adapter, or that it could not."""
        if self.view.plan is not None:
            stage = Stage(replica, adapter)
            self.view.plan = self._change.staged(self.view.plan, stage, is_there=is_there)

    def wants(self, replica: int, adapter: int) -> bool:
        """Tell whether a replica is to have an adapter by the plan that is in effect or comes into it."""
        pending, plan = self._change.pending.get(adapter), self.view.plan
        if pending is not None and replica in pending.waiting:
            return True
        return plan is not None and replica in plan.replicas[adapter]

    def _has(self, replica: int, adapter: int) -> bool:
        tiers = self.view.tiers
        return replica in tiers.on_host(adapter) or replica in tiers.on_device(adapter)

    # ---- what it remembers

    def state(self) -> ControllerState:
        """Return what a controller of the same adapters, replicas and view goes on with."""
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
            migrate_s=None if migrator is None else migrator.due_s,
            moved_s={} if migrator is None else migrator.moved_s,
            executed_s=self._factor.recorded_s,
            prefill=self._prefill,
            output_token_s=self._output_token_s,
        )

    def restore(self, state: ControllerState) -> None:
        """Go on where another controller was."""
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
        if self._migrator is not None and state.migrate_s is not None:
            self._migrator.restore(state.migrate_s, state.moved_s)
        self._factor = MigrationFactor(*state.executed_s)
        self._prefill, self._output_token_s = state.prefill, state.output_token_s
