"""Credits, so that no adapter starves while others run out of turn (dLoRA, Algorithm 3).

Every adapter begins with the same credit. When requests run that first come, first served would not have run,
their adapters pay the adapters of those that had to wait, by the seconds of waiting. An adapter that cannot
pay must not displace others; one that has gained much starves, and its requests run before all others until
it has paid most of that back. The sum of all credits never changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from loraplex.scheduling.request_state import RequestState


@dataclass(frozen=True, kw_only=True, slots=True)
class CreditLimits:
    """Credits in seconds, each of one request. `initial`: of each adapter. An adapter starves above
    `starving` until it is below `normal`."""

    initial: float = 50.0
    starving: float = 100.0
    normal: float = 75.0

    def __post_init__(self) -> None:
        assert 0 < self.initial <= self.normal <= self.starving


@dataclass(slots=True)
class Credits:
    """The credits of adapters; None stands for the base model. `balances`: what each has gained, or lost if
    below 0, since the beginning."""

    limits: CreditLimits = field(default_factory=CreditLimits)
    balances: dict[str | None, float] = field(default_factory=dict)
    _starving: set[str | None] = field(default_factory=set)

    def credit_of(self, adapter: str | None) -> float:
        return self.limits.initial + self.balances.get(adapter, 0.0)

    def starving_among(self, adapters: Set[str | None]) -> frozenset[str | None]:
        """Return which of these adapters starve."""
        for adapter in self.balances.keys() & adapters:  # the others have their first credit
            credit = self.credit_of(adapter)
            if credit > self.limits.starving:
                self._starving.add(adapter)
            elif credit < self.limits.normal:
                self._starving.discard(adapter)
        return frozenset(self._starving.intersection(adapters))

    def can_pay(self, adapter: str | None, num_displaced: int, seconds: float) -> bool:
        """Return whether an adapter may displace so many requests for a step of so many seconds."""
        return self.credit_of(adapter) >= num_displaced * seconds

    def transfer(self, served: Sequence[RequestState], fcfs: Sequence[RequestState], seconds: float) -> None:
        """Let the adapters of the requests that run pay those of the requests that wait for them. `fcfs`:
        the requests that first come, first served would run. `seconds`: those of the step."""
        runs, due = set(served), set(fcfs)
        displaced = [each.adapter for each in fcfs if each not in runs]
        if not displaced or not served:
            return
        payers = [each.adapter for each in served if each not in due] or [each.adapter for each in served]
        for adapter, count in Counter(displaced).items():
            self._gain(adapter, count * seconds)
        share = len(displaced) * seconds / len(payers)
        for adapter, count in Counter(payers).items():
            self._gain(adapter, -count * share)

    def forget(self, adapter: str) -> None:
        """Remove an adapter, and divide what it has gained or lost among the others."""
        self._starving.discard(adapter)
        balance = self.balances.pop(adapter, 0.0)
        for other in self.balances:
            self.balances[other] += balance / len(self.balances)

    def check_integrity(self) -> None:
        """Assert that the credits of all adapters add up to what they began with."""
        balances = self.balances.values()
        assert abs(sum(balances)) <= 1e-9 * sum(map(abs, balances), 1.0)

    def _gain(self, adapter: str | None, amount: float) -> None:
        self.balances[adapter] = self.balances.get(adapter, 0.0) + amount
