"""Place adapters again every period, by the demand in the last ones.

Adapters and replicas come and go: a placement gets those that are present, numbered without gaps, and its
result is translated back to the fleet's own numbers, which never change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from loraplex.core.arrays import FloatArray, IntArray
from loraplex.fleet.adapter_sizes import AdapterSizes
from loraplex.fleet.placements.demand import Demand, extrapolated_demand
from loraplex.fleet.placements.placement import Placement, PlacementProblem
from loraplex.fleet.plan import Entry, Plan

PERIOD_S: Final = 60.0
_NUM_PERIODS: Final = 5
"""Number of periods that demand is predicted from."""


class Counted(NamedTuple):
    """The counted demand by adapter: tokens in this period, and tokens/s in the last ones, oldest first."""

    tokens: FloatArray
    rates: Sequence[FloatArray]


class Replanner:
    """Counts tokens by adapter, and asks a placement for a plan at the end of each period.

    `demand`: predicts demand from past periods. `first_demand`: tokens/s of each adapter until a period is
    over; None if it is taken to be equal for all. `known_demand`: returns the tokens/s of each adapter in the
    period that begins at a given time, if that is known.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        adapters: AdapterSizes,
        num_replicas: int,
        period_s: float = PERIOD_S,
        host_bytes: int | None = None,
        device_bytes: int | None = None,
        num_slots: int | None = None,
        seed: int = 0,
        demand: Demand = extrapolated_demand,
        first_demand: FloatArray | None = None,
        known_demand: Callable[[float], FloatArray] | None = None,
    ) -> None:
        """`period_s`: infinite for a placement that is made once and kept. All replicas serve until `serve`
        is called."""
        assert period_s > 0
        self.period_s = period_s
        self._placement = placement
        self._adapters = adapters
        self._removed: set[int] = set()
        self._returned: set[int] = set()  # since the last plan, whose entries for them mean nothing
        self._given: Mapping[int, Entry] = {}
        self._num_replicas = num_replicas
        self._serving: tuple[int, ...] = tuple(range(num_replicas))
        self._host_bytes = host_bytes
        self._device_bytes = device_bytes
        self._num_slots = num_slots
        self._seed = seed
        self._demand_from = demand
        self._first_demand = np.ones(len(adapters)) if first_demand is None else first_demand
        self._known_demand = known_demand
        self._tokens: FloatArray = np.zeros(len(adapters))
        self._rates: deque[FloatArray] = deque(maxlen=_NUM_PERIODS)

    # ---- adapters and replicas

    def add_adapters(self, added: AdapterSizes) -> None:
        """Place these adapters as well, which get the next numbers; they have no demand yet."""
        self._adapters = self._adapters.followed_by(added)
        self._tokens = self._padded(self._tokens)
        self._first_demand = self._padded(self._first_demand, 1.0)
        self._rates = deque(map(self._padded, self._rates), _NUM_PERIODS)

    def _padded(self, column: FloatArray, value: float = 0.0) -> FloatArray:
        return np.pad(column, (0, len(self._adapters) - len(column)), constant_values=value)

    def remove_adapter(self, adapter: int) -> None:
        """Remove an adapter from plans until it is restored."""
        self._removed.add(adapter)

    def restore_adapter(self, adapter: int) -> None:
        """Place an adapter again that was removed."""
        self._removed.remove(adapter)
        self._returned.add(adapter)

    def serve(self, replicas: Iterable[int], num_replicas: int) -> None:
        """Place adapters on these replicas from now on; there must be at least one."""
        self._serving = tuple(sorted(replicas))
        self._num_replicas = num_replicas
        assert self._serving, "a plan needs a replica"

    @property
    def given(self) -> Mapping[int, Entry]:
        """The entries that are kept whatever the placement says."""
        return self._given

    def give(self, given: Mapping[int, Entry]) -> None:
        """Keep these entries from the next plan on, each while one of its replicas serves; other adapters go
        where the placement puts them. Replaces what was given before."""
        self._given = given

    @property
    def counted(self) -> Counted:
        return Counted(self._tokens, list(self._rates))

    def restore(self, counted: Counted) -> None:
        """Continue with another planner's counts."""
        self._tokens = counted.tokens
        self._rates = deque(counted.rates, _NUM_PERIODS)

    # ---- plans

    def count(self, adapter: int, num_tokens: int) -> None:
        self._tokens[adapter] += num_tokens

    def place(self, previous: Plan | None, *, since_s: float, now_s: float) -> Plan:
        """Return the plan for the period that begins now. Tokens counted since the last call belong to the
        period from `since_s` on."""
        demand = self._demand(since_s, now_s, is_first=previous is None)
        return self._as_given(self._place(None if previous is None else self._whole(previous), demand))

    def place_again(self, previous: Plan) -> Plan:
        """Return a plan that includes replicas that have joined during the present period, which
        continues."""
        return self._as_given(self._place(self._whole(previous), self._expected()))

    def mended(self, plan: Plan) -> Plan:
        """Return the plan itself if every adapter has a serving replica, it names no other, and given entries
        are kept, else a repaired plan that moves nothing else. A lost replica's share goes to the adapter's
        other replicas; an adapter without any gets the places of a fresh plan."""
        return self._as_given(self._whole(plan))

    def _as_given(self, plan: Plan) -> Plan:
        """Return a whole plan with the given entries that a serving replica can keep; the plan itself if they
        are there already."""
        if not self._given:
            return plan
        serving, entries = set(self._serving), plan.entries()
        for adapter in self._given.keys() - self._removed:
            entries[adapter] = self._given[adapter].limited_to(serving) or entries[adapter]
        found = Plan.of_entries(entries)
        return plan if found == plan else found

    def _whole(self, plan: Plan) -> Plan:
        """Return the plan, repaired like `mended`, whatever was given."""
        if self._is_whole and not self._returned and len(plan.replicas) == len(self._adapters):
            return plan
        serving = set(self._serving)
        left = [entry.limited_to(serving) for entry in plan.entries()]
        left += [None] * (len(self._adapters) - len(left))
        for adapter in self._returned:
            left[adapter] = None
        self._returned.clear()
        if any(left[adapter] is None for adapter in self._numbers().tolist()):
            fresh = self._place(None, self._expected()).entries()
            found = [entry or other for entry, other in zip(left, fresh, strict=True)]
        else:
            found = [entry or self._anywhere() for entry in left]
        mended = Plan.of_entries(found)
        return plan if mended == plan else mended

    def _place(self, previous: Plan | None, demand: FloatArray) -> Plan:
        """Ask the placement, with adapters and replicas numbered by their positions among those present."""
        if self._is_whole:
            return self._placement.place(self._problem(self._adapters, demand, previous))
        numbers = self._numbers()
        before = None if previous is None else self._among_those_there(previous, numbers)
        problem = self._problem(self._adapters.at(numbers), demand[numbers], before)
        placed = self._placement.place(problem)
        if before is not None and placed is before:
            assert previous is not None
            return previous
        entries = [self._anywhere()] * len(self._adapters)
        for adapter, entry in zip(numbers.tolist(), placed.entries(), strict=True):
            entries[adapter] = entry.renumbered(self._serving)
        return Plan.of_entries(entries)

    def _problem(self, adapters: AdapterSizes, demand: FloatArray, previous: Plan | None) -> PlacementProblem:
        return PlacementProblem(
            adapters=adapters,
            num_replicas=len(self._serving),
            demand=demand,
            host_bytes=self._host_bytes,
            device_bytes=self._device_bytes,
            num_slots=self._num_slots,
            previous=previous,
            seed=self._seed,
        )

    @property
    def _is_whole(self) -> bool:
        """Return whether all replicas serve and no adapter is removed, so that numbers have no gaps."""
        return len(self._serving) == self._num_replicas and not self._removed

    def _numbers(self) -> IntArray:
        """Return the adapters to be placed."""
        there = np.ones(len(self._adapters), np.bool_)
        there[list(self._removed)] = False
        return there.nonzero()[0]

    def _among_those_there(self, plan: Plan, numbers: IntArray) -> Plan:
        """Return a repaired plan in the numbers of those present."""
        places = {replica: place for place, replica in enumerate(self._serving)}
        entries = plan.entries()
        return Plan.of_entries([entries[adapter].renumbered(places) for adapter in numbers.tolist()])

    def _anywhere(self) -> Entry:
        """Return the entry of an adapter that is removed: a plan needs one for each number."""
        return Entry(self._serving[:1], (1.0,))

    def _demand(self, since_s: float, now_s: float, *, is_first: bool) -> FloatArray:
        """Return the expected tokens/s of each adapter in the period that begins now."""
        if self._known_demand is not None:
            return self._known_demand(now_s)
        if is_first:
            return self._first_demand
        assert math.isfinite(self.period_s), "this placement is made once"
        assert since_s < now_s, "a rate is over some time"
        self._rates.append(self._tokens / (now_s - since_s))
        self._tokens = np.zeros(len(self._adapters))
        return self._expected()

    def _expected(self) -> FloatArray:
        """Return the expected tokens/s of each adapter from past periods."""
        if not self._rates:
            return self._first_demand
        return self._demand_from(np.stack(self._rates))
