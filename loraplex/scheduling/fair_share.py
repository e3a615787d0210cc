"""Fair shares of an engine by virtual token counters (VTC: "Fairness in Serving Large Language Models").

Each tenant has a counter, which grows by the cost of the service that its requests get, divided by its share.
The tenant with the lowest counter is served next. One that has had nothing waiting begins again at the lowest
counter of those that wait, so that nobody saves up service for later, and nobody's idle time is wasted:

    served     counter += cost / share             prompts when admitted, answers token by token
    arrives    counter  = max(counter, lowest of the tenants that wait, or that of the last one that did)

While two tenants both wait, the service that they get in proportion to their shares never differs by more
than two prompts or two full batches of answers: VTC's bound. The cost of a request is what the cost model
predicts for its tokens beside those of others, with its adapter's bytes, and for the loads of adapters that
it causes. Without a cost model it is counted in tokens, one for each of a prompt and two for each of an
answer, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

from loraplex.core.request import EngineRequest
from loraplex.core.tenants import BATCH_PRIORITY, NO_TENANT, TenantPolicy
from loraplex.perf.cost_model import CostModel
from loraplex.perf.drift import DriftWatch
from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.request_state import RequestState

_PROMPT: Final = 512
"""Tokens of the prompts, and positions of the decodes, whose steps the costs of a token are taken from."""
_NUM_PROMPTS: Final = 4
_NUM_DECODES: Final = 32


class _Rates(NamedTuple):
    """Cost of one token: of a prompt, of an answer; of one position that a token of an answer attends to, and
    of one pair of positions in a prompt."""

    prompt: float
    output: float
    output_position: float = 0.0
    prompt_pair: float = 0.0


_IN_TOKENS: Final = _Rates(prompt=1.0, output=2.0)
"""The weights of the paper."""


class RequestCosts:
    """The costs of requests in predicted seconds; in tokens without a cost model (`is_seconds` is False)."""

    def __init__(self, costs: DriftWatch | None, num_bytes: Callable[[str], int]) -> None:
        """`num_bytes`: returns the bytes of a version's weights; 0 if it is unknown."""
        self._costs = costs
        self._num_bytes = num_bytes
        self._rates: dict[int, _Rates] = {}  # by bytes of the adapter: few different ones
        self._rated: CostModel | None = None  # the model that the rates are of
        self.is_seconds: Final = costs is not None

    def prompt(self, version: str | None, num_tokens: int, start: int = 0) -> float:
        """Return the cost of computing so many tokens of a prompt after the first `start`."""
        rates = self._rates_of(version)
        pairs = num_tokens * (start + num_tokens / 2)
        return rates.prompt * num_tokens + rates.prompt_pair * pairs

    def output(self, version: str | None, num_tokens: int, start: int) -> float:
        """Return the cost of so many tokens of an answer behind `start` tokens."""
        rates = self._rates_of(version)
        return num_tokens * (rates.output + rates.output_position * (start + num_tokens / 2))

    def load(self, version: str) -> float:
        """Return the cost of loading an adapter."""
        return 0.0 if self._costs is None else self._costs.model.copy_s(self._num_bytes(version))

    def _rates_of(self, version: str | None) -> _Rates:
        if self._costs is None:
            return _IN_TOKENS
        model = self._costs.model
        if model is not self._rated:
            self._rates.clear()
            self._rated = model
        num_bytes = 0 if version is None else self._num_bytes(version)
        rates = self._rates.get(num_bytes)
        if rates is None:
            rates = self._rates[num_bytes] = _rates_by(model, num_bytes)
        return rates


def _rates_by(model: CostModel, num_bytes: int) -> _Rates:
    num_tokens = _NUM_PROMPTS * _PROMPT
    pair = model.step.terms.prompt_pair_s * model.corrections.step
    prompts_s = model.step_s(_with_adapters(StepFeatures(0, _NUM_PROMPTS, num_tokens), num_bytes))
    near, far = (
        model.step_s(_with_adapters(StepFeatures(_NUM_DECODES, 0, 0, _NUM_DECODES * at), num_bytes))
        for at in (_PROMPT, 2 * _PROMPT)
    )
    position = (far - near) / (_NUM_DECODES * _PROMPT)
    return _Rates(prompts_s / num_tokens, near / _NUM_DECODES - position * _PROMPT, position, pair)


def _with_adapters(step: StepFeatures, num_bytes: int) -> StepFeatures:
    """Return the step with an adapter of this size for each request."""
    if num_bytes == 0:
        return step
    num_requests = step.num_decodes + step.num_prompts
    return step._replace(
        num_adapters=num_requests,
        adapter_bytes=num_requests * num_bytes,
        row_adapter_bytes=step.num_rows * num_bytes,
        largest_adapter_bytes=num_bytes,
        num_adapter_rows=step.num_rows,
    )


class FairShare:
    """The counters of one engine's tenants. `costs`: of requests."""

    def __init__(self, costs: RequestCosts) -> None:
        self.costs = costs
        self._policies: Mapping[str, TenantPolicy] = {}
        self._counters: dict[str, float] = {}
        self._last_waited = NO_TENANT
        self._num_special = 0  # requests present that have a priority or an SLO
        self._num_paced = 0  # requests present that have an objective for the time per token

    def set_policies(self, policies: Iterable[TenantPolicy]) -> None:
        """Replace the rights of tenants; those without have a share of 1."""
        self._policies = {each.name: each for each in policies}

    def share(self, tenant: str) -> float:
        policy = self._policies.get(tenant)
        return 1.0 if policy is None else policy.share

    def rank(self, tenant: str) -> int:
        """Return the tenant's priority: those with a lower one are served first."""
        policy = self._policies.get(tenant)
        return 0 if policy is None else policy.priority

    def slo_ttft_s(self, request: EngineRequest) -> float | None:
        """Return the seconds within which a request should have its first token; None without a target, as
        lines of batches are."""
        if request.priority >= BATCH_PRIORITY:
            return None
        if request.slo_ttft_s is not None:
            return request.slo_ttft_s
        policy = self._policies.get(request.tenant)
        return None if policy is None else policy.slo_ttft

    def slo_tpt_s(self, request: EngineRequest) -> float | None:
        """Return the seconds that each later token of a request should take at most; None without a
        target, as lines of batches are."""
        if request.priority >= BATCH_PRIORITY:
            return None
        if request.slo_tpt_s is not None:
            return request.slo_tpt_s
        policy = self._policies.get(request.tenant)
        return None if policy is None else policy.slo_tpt

    @property
    def has_paces(self) -> bool:
        """Return whether any request in the engine has an objective for the time per token."""
        return self._num_paced > 0

    @property
    def has_many(self) -> bool:
        """Return whether there has been more than one tenant; before that, counters mean nothing."""
        return len(self._counters) > 1

    @property
    def is_shared(self) -> bool:
        """Return whether there has been more than one tenant, or there is a request with a priority or an
        SLO."""
        return self._num_special > 0 or self.has_many

    def makes_shared(self, request: EngineRequest) -> bool:
        """Return whether `is_shared` holds with this request."""
        is_new = bool(self._counters) and request.tenant not in self._counters
        return self.is_shared or is_new or _is_special(request, self.slo_ttft_s(request))

    def counter(self, tenant: str) -> float:
        """Return the service that a tenant got so far, per unit of its share."""
        return self._counters.get(tenant, 0.0)

    # ---- events

    def arrives(
        self, request: RequestState, waiting: Collection[str], running: Iterable[RequestState]
    ) -> None:
        """Record that a request arrives. `waiting`: the tenants that wait already."""
        tenant = request.request.tenant
        self._num_special += _is_special(request.request, request.slo_ttft_s)
        self._num_paced += request.slo_tpt_s is not None
        if tenant in self._counters and (tenant in waiting or not self.has_many):
            return
        self._counters.setdefault(tenant, 0.0)
        if self.has_many:
            self.settle(running)  # before it is compared with others
            peers = [each for each in waiting if self.rank(each) == self.rank(tenant)]
            level = min(map(self.counter, peers)) if peers else self.counter(self._last_waited)
            self._counters[tenant] = max(self._counters[tenant], level)

    def admitted(self, request: RequestState) -> None:
        """Charge the prompt of a request that begins to run, without what the prefix cache has of it. A
        preempted request is not charged again for what is computed again."""
        num_tokens = len(request.token_ids)
        if request.num_charged == 0:
            num_cached = request.num_cached or 0
            self._charge(request, self.costs.prompt(request.adapter, num_tokens - num_cached, num_cached))
            request.num_charged = num_tokens

    def settle(self, requests: Iterable[RequestState]) -> None:
        """Charge running requests for the tokens of their answers since they were last charged."""
        for request in requests:
            num_new = request.num_tokens - request.num_charged
            if num_new > 0:
                self._charge(request, self.costs.output(request.adapter, num_new, request.num_charged))
                request.num_charged += num_new

    def loads(self, request: RequestState) -> None:
        """Charge a request that has its adapter loaded."""
        assert request.adapter is not None
        self._charge(request, self.costs.load(request.adapter))

    def stopped_waiting(self, tenant: str) -> None:
        """Record that a tenant has nothing waiting any more."""
        self._last_waited = tenant

    def ended(self, request: RequestState) -> None:
        """Record that a request has left the engine."""
        self._num_special -= _is_special(request.request, request.slo_ttft_s)
        self._num_paced -= request.slo_tpt_s is not None

    def _charge(self, request: RequestState, cost: float) -> None:
        tenant = request.request.tenant
        self._counters[tenant] = self.counter(tenant) + cost / self.share(tenant)


def _is_special(request: EngineRequest, slo_ttft_s: float | None) -> bool:
    return request.priority != 0 or slo_ttft_s is not None
