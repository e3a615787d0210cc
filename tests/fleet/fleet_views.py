"""Fleets as routers see them: a view, and the plain list of requests that it was made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from loraplex.core.shape import ModelShape
from loraplex.core.tenants import NO_TENANT
from loraplex.fleet.answer_length import AnswerLength
from loraplex.fleet.load import FleetLoad, ReplicaLimits
from loraplex.fleet.plan import Plan
from loraplex.fleet.request import RoutedRequest
from loraplex.fleet.tiers import AdapterTiers
from loraplex.fleet.view import FleetView
from loraplex.perf.cost_model import CostModel
from loraplex.perf.default_model import default_cost_model
from loraplex.perf.set_costs import PaddedSetCosts, RankSetCosts, RequestSets, SetCosts, StepSetCosts
from loraplex.perf.subject import Subject

RANKS = (8, 16, 32, 64, 8, 16, 32, 64)
"""Ranks by adapter."""
MEAN_TOKENS = 128.0
"""Tokens of an answer; a power of two like all coefficients below, so that sums are exact and ties are ties
in any order of addition."""
HOST_S, ELSEWHERE_S = 2.0**-9, 2.0**-6

_COEFFICIENTS = {
    "decode_rank_s": 2.0**-18,
    "decode_base_s": 2.0**-5,
    "prefill_token_s": 2.0**-14,
    "prefill_token_rank_s": 2.0**-22,
    "prefill_base_s": 2.0**-8,
}


def _step_model() -> CostModel:
    """A guessed engine, with something for every term, so that adapters are not free."""
    subject = Subject(machine="any", device="cuda", model="small", dtype="bfloat16", num_layers=2)
    shape = ModelShape(
        family="llama",
        num_layers=2,
        hidden_size=512,
        intermediate_size=1024,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        vocab_size=1000,
        max_position=4096,
    )
    model = default_cost_model(subject, shape, num_cores=2)
    terms = replace(
        model.step.terms, lora_s=1e-4, prompt_lora_s=1e-4, adapter_s=1e-4, row_adapter_byte_s=1e-13
    )
    return replace(model, step=replace(model.step, terms=terms))


COSTS: dict[str, SetCosts] = {
    "padded": PaddedSetCosts(**_COEFFICIENTS),
    "rank-proportional": RankSetCosts(**_COEFFICIENTS),
    "steps": StepSetCosts(_step_model(), rank_bytes=1e6),
}


class Moves:
    """The same seconds for all adapters."""

    def from_host_s(self, adapter: int) -> float:
        return HOST_S

    def from_elsewhere_s(self, adapter: int) -> float:
        return ELSEWHERE_S


class Sent(NamedTuple):
    """A request at a replica. `is_running`: it has its first token."""

    request: RoutedRequest
    replica: int
    is_running: bool


@dataclass
class Fleet:
    """A view, and the requests that it should count."""

    view: FleetView
    sent: list[Sent] = field(default_factory=list)

    def send(self, request: RoutedRequest, replica: int, *, is_running: bool = False) -> None:
        request_id = len(self.sent)
        self.view.load.sent(request_id, request, replica)
        if is_running:
            self.view.load.first_token(request_id)
        self.sent.append(Sent(request, replica, is_running))

    def requests(self, replica: int) -> list[RoutedRequest]:
        return [each.request for each in self.sent if each.replica == replica]

    def queue(self, replica: int) -> list[RoutedRequest]:
        return [each.request for each in self.sent if each.replica == replica and not each.is_running]

    def snapshot(self) -> list[object]:
        """Return everything that a router could change, as values."""
        load, tiers = self.view.load, self.view.tiers
        columns = [column.tolist() for sets in (load.everything, load.waiting) for column in sets]
        places = [(sorted(tiers.on_device(each)), sorted(tiers.on_host(each))) for each in range(len(RANKS))]
        return [*columns, load.accepts.tolist(), load.answers.mean_tokens, places, self.view.plan]


def request_of(adapter: int | None, prompt_tokens: int = 64, tenant: str = NO_TENANT) -> RoutedRequest:
    return RoutedRequest(adapter, 0 if adapter is None else RANKS[adapter], prompt_tokens, tenant=tenant)


def fleet_of(
    num_replicas: int = 4,
    *,
    costs: SetCosts = COSTS["rank-proportional"],
    plan: Plan | None = None,
    slo_s: float | None = None,
    down: Iterable[int] = (),
    limits: Sequence[ReplicaLimits] | None = None,
) -> Fleet:
    each = ReplicaLimits(max_running=8, kv_tokens=4096, max_adapters=2)
    load = FleetLoad(limits or [each] * num_replicas, AnswerLength(MEAN_TOKENS))
    load.accepts[list(down)] = False
    return Fleet(
        FleetView(load=load, tiers=AdapterTiers(), costs=costs, moves=Moves(), plan=plan, slo_s=slo_s)
    )


def set_of(requests: Sequence[RoutedRequest]) -> RequestSets:
    """Return one set, counted by iterating over its requests."""
    return RequestSets(
        num_requests=np.array([len(requests)]),
        sum_ranks=np.array([sum(each.rank for each in requests)]),
        max_rank=np.array([max((each.rank for each in requests), default=0)]),
        prompt_tokens=np.array([sum(each.prompt_tokens for each in requests)]),
        kv_tokens=np.array([sum(each.prompt_tokens + MEAN_TOKENS for each in requests)]),
        num_adapters=np.array([len({each.adapter for each in requests} - {None})]),
    )


def candidates_of(fleet: Fleet, request: RoutedRequest) -> list[int]:
    """Return the replicas of the plan that are up; any that is up if none of these is."""
    up = [replica for replica, accepts in enumerate(fleet.view.load.accepts) if accepts]
    plan = fleet.view.plan
    placed = (
        range(len(up) + 99) if plan is None or request.adapter is None else plan.replicas[request.adapter]
    )
    return [replica for replica in up if replica in placed] or up


def with_room(fleet: Fleet, request: RoutedRequest, replicas: Sequence[int]) -> list[int]:
    """Return those whose KV memory holds their requests and this one; all if there is none."""
    load = fleet.view.load
    fitting = [
        replica
        for replica in replicas
        if sum(each.prompt_tokens + MEAN_TOKENS for each in [*fleet.requests(replica), request])
        <= load.limits[replica].kv_tokens
    ]
    return fitting or list(replicas)


# ---- drawn by hypothesis

REQUESTS = st.builds(
    request_of,
    st.none() | st.integers(0, len(RANKS) - 1),
    st.integers(1, 40).map(lambda n: 32 * n),
    st.sampled_from(["", "a", "b"]),
)


@st.composite
def fleets(draw: st.DrawFn, *, costs: Iterable[str] = ("rank-proportional",)) -> Fleet:
    """Draw few replicas and few kinds of requests, so that ties are frequent. At least one replica is up."""
    num_replicas = draw(st.integers(1, 6))
    down = draw(st.sets(st.integers(0, num_replicas - 1), max_size=num_replicas - 1))
    places = st.sets(st.integers(0, num_replicas - 1), min_size=1)
    plan = draw(st.none() | st.lists(places, min_size=len(RANKS), max_size=len(RANKS)).map(_equal_plan))
    limits = st.builds(
        ReplicaLimits,
        max_running=st.integers(1, 4),
        kv_tokens=st.integers(1, 12).map(lambda n: 256 * n),
        max_adapters=st.none() | st.integers(1, 3),
    )
    fleet = fleet_of(
        num_replicas,
        costs=COSTS[draw(st.sampled_from(sorted(costs)))],
        plan=plan,
        slo_s=draw(st.none() | st.sampled_from([0.005, 0.03, 0.032, 0.033, 1.0])),
        down=down,
        limits=draw(st.lists(limits, min_size=num_replicas, max_size=num_replicas)),
    )
    replicas = st.integers(0, num_replicas - 1)
    for request, replica, is_running in draw(
        st.lists(st.tuples(REQUESTS, replicas, st.booleans()), max_size=14)
    ):
        fleet.send(request, replica, is_running=is_running)
    for adapter, replica, on_device in draw(
        st.lists(st.tuples(st.integers(0, len(RANKS) - 1), replicas, st.booleans()), max_size=10)
    ):
        (fleet.view.tiers.loaded if on_device else fleet.view.tiers.staged)(replica, adapter)
    return fleet


def _equal_plan(replicas: Sequence[Iterable[int]]) -> Plan:
    return Plan.with_equal_shares([sorted(each) for each in replicas])
