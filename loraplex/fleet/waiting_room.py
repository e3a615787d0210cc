"""The requests of a server by tenant, and which are refused when not all can be served.

A request is refused at once if it could not be served in time: by the predicted time to its first token,
which counts only the requests that would be served before it. By fair shares (`scheduling.fair_share`) these
are

    all of tenants of a lower `priority`, none of a higher one
    all live requests before lines of batches, of whichever tenant of its priority
    all of tenants that may run more before those that may not (`core.due_places`)
    of the other tenants, as much as they are due for their shares until its own tenant's requests are served
    of its own tenant, those of its own or a lower `priority`

so a tenant that asks for more than its share waits for its own requests, and is refused first. A request
with an objective for the time per token is refused as well if it would be too slow itself, by prediction: in
the batch that it would run in.

The number of waiting requests is limited, too. Half of the places are reserved for tenants with rights, by
their shares, so that no tenant can fill all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from loraplex.core.due_places import DuePlaces
from loraplex.core.tenants import BATCH_PRIORITY, Caller, TenantPolicy
from loraplex.fleet.admission import Admission, Admitted, Bounded, Forecast

_RESERVED: Final = 0.5
"""Share of the places that is reserved for tenants."""
_PACE_RETRY_S: Final = 1.0
"""Seconds after which a request is tried again that would be too slow now."""


class Limit(NamedTuple):
    """Seconds that a first token may take, None for any number, and whether that is an objective."""

    limit_s: float | None
    is_slo: bool


class Verdict(NamedTuple):
    """A prediction that decided. `retry_after_s`: None if the request is admitted. `seconds`: until its first
    token, or if `is_pace`, for each later one. `limit_s`, `is_slo`: as in Limit."""

    retry_after_s: float | None
    seconds: float
    limit_s: float
    is_slo: bool
    is_pace: bool = False


class _Line:
    """The waiting requests of one tenant with one priority. `num_encoded`: those whose tokens are known."""

    __slots__ = ("num_encoded", "num_requests", "num_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_encoded = 0
        self.num_tokens = 0


class WaitingRoom:
    """Counts the waiting and running requests of a server. `admission`: corrects predictions by what was
    measured; those for a tenant with rights by its own requests, as soon as there are enough.
    `max_borrowing`: that of the engines."""

    def __init__(
        self, max_requests: int, max_ttft_s: float | None = None, max_borrowing: float | None = None
    ) -> None:
        self.admission: Final = Admission(max_ttft_s)
        self._admissions: dict[str, Admission] = {}
        self._paces = Admission(None)  # corrects the time for each later token, which all of a step share
        self._max_borrowing = max_borrowing
        self._now_s = 0.0
        self._places = DuePlaces(self._share)
        self._num_running: Counter[str] = Counter()  # requests with a first token, by tenant
        self._running: Counter[Caller] = Counter()  # the same, by sender
        self._max_requests = max_requests
        self._policies: Mapping[str, TenantPolicy] = {}
        self._lines: dict[str, dict[int, _Line]] = {}
        self._num_by_tenant: Counter[str] = Counter()
        self._reserved: dict[str, int] = {}
        self._num_unused = 0  # reserved places that their tenants do not use
        self.num_requests = 0
        self.num_encoded = 0
        self.num_tokens = 0

    def set_policies(self, policies: Iterable[TenantPolicy]) -> None:
        """Replace the rights of tenants."""
        self._policies = {each.name: each for each in policies}
        self._admissions = {
            name: self._admissions.get(name) or Admission(self.admission.max_ttft_s)
            for name in self._policies
        }
        total = sum(each.share for each in self._policies.values())
        places = _RESERVED * self._max_requests
        self._reserved = {name: int(places * each.share / total) for name, each in self._policies.items()}
        self._num_unused = sum(
            max(count - self._num_by_tenant[name], 0) for name, count in self._reserved.items()
        )

    # ---- who is refused

    def has_place_for(self, tenant: str, num_requests: int) -> bool:
        """Return whether so many requests of a tenant may wait beside the others."""
        num_free = self._max_requests - self.num_requests - num_requests
        reserved, used = self._reserved.get(tenant, 0), self._num_by_tenant[tenant]
        if num_free < 0:
            return False
        for_others = self._num_unused - max(reserved - used, 0)
        return used + num_requests <= reserved or num_free >= for_others

    def limit_s(self, caller: Caller) -> Limit:
        """Return how long a first token may take. Lines of batches wait as long as they have to."""
        if caller.priority >= BATCH_PRIORITY:
            return Limit(None, is_slo=False)
        policy = self._policies.get(caller.tenant)
        slo_s = caller.slo_ttft_s
        if slo_s is None and policy is not None:
            slo_s = policy.slo_ttft
        most_s = self.admission.max_ttft_s
        if slo_s is not None and (most_s is None or slo_s < most_s):
            return Limit(slo_s, is_slo=True)
        return Limit(most_s, is_slo=False)

    def pace_s(self, caller: Caller) -> float | None:
        """Return how long each token after the first may take; None for any time."""
        if caller.priority >= BATCH_PRIORITY:
            return None
        if caller.slo_tpt_s is not None:
            return caller.slo_tpt_s
        policy = self._policies.get(caller.tenant)
        return None if policy is None else policy.slo_tpt

    def is_limited(self, caller: Caller) -> bool:
        """Return whether a prediction decides on a request."""
        return self.limit_s(caller).limit_s is not None or self.pace_s(caller) is not None

    def pass_time(self, now_s: float) -> None:
        """Set the time at which requests come and go from now on."""
        self._now_s = now_s

    def observe(self, now_s: float) -> None:
        """Decide which tenants are bounded from now on. Called whenever a request arrives."""
        self.pass_time(now_s)
        self._places.observe(now_s)

    def _share(self, tenant: str) -> float:
        policy = self._policies.get(tenant)
        return 1.0 if policy is None else policy.share

    def _bounds(self, tenant: str) -> float | None:
        """Return how many requests a tenant is due to run; None if nothing bounds it: neither `max_borrowing`
        nor objectives of others that run. As `scheduling.borrowing` decides it."""
        if self._max_borrowing is None and not self._paces_of_others(tenant):
            return None
        return self._places.due(tenant)

    def _is_held(self, tenant: str) -> bool:
        """Return whether a tenant has as many requests as it may run, so that others come first. As far as
        objectives let it run more, it has not: the batch that decides on that is unknown here."""
        due = None if self._max_borrowing is None else self._bounds(tenant)
        return due is not None and self._num_running[tenant] >= due

    def before(self, caller: Caller, others: int = 0, other_tokens: int = 0, num_tokens: int = 1) -> Admitted:
        """Return all waiting requests, and the part of them that is served before one of `num_tokens`.
        `others`, `other_tokens`: requests of the same call, which are served before it."""
        ahead, total = float(other_tokens), self.num_tokens + other_tokens
        own = self._lines.get(caller.tenant, {})
        before = [line for priority, line in own.items() if priority <= caller.priority]
        ahead += sum(line.num_tokens for line in before)
        ahead += self._others_before(caller, (ahead + num_tokens) / self._share(caller.tenant))
        due, bounded = self._bounds(caller.tenant), None
        if due is not None:
            num_before = self._num_running[caller.tenant] + others + sum(line.num_encoded for line in before)
            paces_s = self._paces_of_others(caller.tenant)
            bounded = Bounded(caller.tenant, num_before, due, self._max_borrowing, paces_s)
        part = min(ahead / total, 1.0) if total else 1.0
        return Admitted(self.num_encoded + others, total, part, bounded)

    def _others_before(self, caller: Caller, turn: float) -> float:
        """Return the tokens of other tenants that are served before a request. `turn`: the tokens of its own
        tenant up to it, for its share."""
        rank, is_live = self._rank(caller.tenant), caller.priority < BATCH_PRIORITY
        is_held, ahead = self._is_held(caller.tenant), 0.0
        for tenant, lines in self._lines.items():
            their_rank = self._rank(tenant)
            if tenant == caller.tenant or their_rank > rank:
                continue
            live = sum(line.num_tokens for each, line in lines.items() if each < BATCH_PRIORITY)
            batch = sum(line.num_tokens for each, line in lines.items() if each >= BATCH_PRIORITY)
            if their_rank < rank:
                ahead += live + batch
                continue
            if not is_live:
                ahead += live
            theirs = live if is_live else batch
            if (is_theirs_held := self._is_held(tenant)) == is_held:
                ahead += min(theirs, turn * self._share(tenant))
            elif not is_theirs_held:
                ahead += theirs
        return ahead

    def _rank(self, tenant: str) -> int:
        policy = self._policies.get(tenant)
        return 0 if policy is None else policy.priority

    def _paces_of_others(self, tenant: str) -> tuple[float, ...]:
        """Return the objectives for the time per token of the other tenants' running requests."""
        paces = {self.pace_s(each) for each in self._running if each.tenant != tenant}
        return tuple(sorted(pace_s for pace_s in paces if pace_s is not None))

    def judge(self, predicted: Forecast, caller: Caller, waited_s: float = 0.0) -> Verdict | None:
        """Decide on a request with this prediction; None if nothing limits it."""
        pace_s = self.pace_s(caller)
        if pace_s is not None and self._is_too_slow(predicted, caller, pace_s):
            seconds = self._paces.correction * predicted.tpt_s
            return Verdict(_PACE_RETRY_S, seconds, pace_s, is_slo=True, is_pace=True)
        limit_s, is_slo = self.limit_s(caller)
        if limit_s is None:
            return None
        admission = self._admissions.get(caller.tenant)
        if admission is None or not admission.is_corrected:
            admission = self.admission
        retry_after_s = admission.retry_after_s(predicted, waited_s, limit_s=limit_s)
        ttft_s = waited_s + admission.correction * predicted.ttft_s
        if waited_s + predicted.ttft_s <= limit_s and self._is_first(caller.tenant):
            retry_after_s = None
        return Verdict(retry_after_s, ttft_s, limit_s, is_slo)

    def _is_too_slow(self, predicted: Forecast, caller: Caller, pace_s: float) -> bool:
        """Return whether a request would miss its objective for the time per token. That of a tenant with
        nothing here is admitted unless it would without any correction: see `_is_first`."""
        if not self._paces.is_too_slow(predicted, pace_s):
            return False
        waits = any(line.num_encoded for line in self._lines.get(caller.tenant, {}).values())
        return waits or self._num_running[caller.tenant] > 0 or predicted.tpt_s > pace_s

    def _is_first(self, tenant: str) -> bool:
        """Return whether a tenant with rights has nothing waiting. Its next request is admitted unless it
        would be late without any correction: a correction that is too large would never be found wrong."""
        lines = self._lines.get(tenant, {}).values()
        return tenant in self._admissions and not any(line.num_encoded for line in lines)

    def came(self, predicted: Forecast, measured_s: float, caller: Caller) -> None:
        """Record the time to the first token of a request that was admitted with this prediction."""
        limit_s, _ = self.limit_s(caller)
        if limit_s is None:
            return
        self.admission.observe(predicted.ttft_s, measured_s, limit_s)
        if caller.tenant in self._admissions:
            self._admissions[caller.tenant].observe(predicted.ttft_s, measured_s, limit_s)

    def paced(self, predicted: Forecast, tpt_s: float, caller: Caller) -> None:
        """Record the time for each later token of a request that was admitted with this prediction."""
        pace_s = self.pace_s(caller)
        if pace_s is not None:
            self._paces.observe(predicted.tpt_s, tpt_s, pace_s)

    # ---- who waits, and who runs

    def enter(self, caller: Caller, num_requests: int) -> None:
        """Count requests from now on."""
        self.num_requests += num_requests
        self._line_of(caller).num_requests += num_requests
        self._count(caller.tenant, num_requests)

    def encoded(self, caller: Caller, lens: Iterable[int]) -> None:
        """Count the tokens of waiting requests, which are known now."""
        line = self._line_of(caller)
        for num_tokens in lens:
            self.num_encoded += 1
            self.num_tokens += num_tokens
            line.num_encoded += 1
            line.num_tokens += num_tokens

    def began(self, caller: Caller, num_tokens: int | None) -> None:
        """Record that a waiting request runs, as its first token came; `ended` must follow."""
        self.leave(caller, num_tokens)
        self._num_running[caller.tenant] += 1
        self._running[caller] += 1
        self._places.change(caller.tenant, 1, self._now_s)  # it neither came nor left

    def ended(self, caller: Caller) -> None:
        """Record that a running request has ended."""
        self._num_running[caller.tenant] -= 1
        if self._num_running[caller.tenant] == 0:
            del self._num_running[caller.tenant]
        self._running[caller] -= 1
        if self._running[caller] == 0:
            del self._running[caller]
        self._places.change(caller.tenant, -1, self._now_s)

    def leave(self, caller: Caller, num_tokens: int | None) -> None:
        """Record that a request waits no longer. `num_tokens`: None if they were not known."""
        line = self._line_of(caller)
        line.num_requests -= 1
        self.num_requests -= 1
        if num_tokens is not None:
            self.num_encoded -= 1
            self.num_tokens -= num_tokens
            line.num_encoded -= 1
            line.num_tokens -= num_tokens
        self._count(caller.tenant, -1)
        if line.num_requests == 0:
            del self._lines[caller.tenant][caller.priority]
            if not self._lines[caller.tenant]:
                del self._lines[caller.tenant]

    def _line_of(self, caller: Caller) -> _Line:
        return self._lines.setdefault(caller.tenant, {}).setdefault(caller.priority, _Line())

    def _count(self, tenant: str, change: int) -> None:
        self._places.change(tenant, change, self._now_s)
        reserved, used = self._reserved.get(tenant, 0), self._num_by_tenant[tenant]
        self._num_unused += max(reserved - used - change, 0) - max(reserved - used, 0)
        self._num_by_tenant[tenant] = used + change
        if used + change == 0:
            del self._num_by_tenant[tenant]
