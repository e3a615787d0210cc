"""Explain why a request went to its replica, by replaying the decision from the log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from loraplex.core.continuation import request_id_of
from loraplex.core.errors import UserError
from loraplex.fleet.policy import Policy
from loraplex.fleet.policy_words import ROUTINGS_EXPLAINED
from loraplex.fleet.routers.added_costs import AddedCosts
from loraplex.server.fleet.guessed_costs import ELSEWHERE
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.routing_events import Began, Decision, RoutingEvent, Sent, call_id_of

_MAX_NAMED: Final = 3
_HOMES: Final = {"device": "it had the adapter ready", "host": "it had the adapter in host memory"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSeen:
    """One replica as the router saw it. `adapter`: the tier of the request's adapter there: device, host or
    disk. `placed`: the share of the adapter's requests that the placement gives this replica; None if it
    gives none, or every replica serves every adapter. `step_ms`: duration of a decode step there with the
    request; `queue_ms`: time for the prompts before it; `load_ms`: time until it has the adapter;
    `ms_per_token`: all of these, spread over an answer of the usual length. `verdict`: chosen, migrated to,
    or why it could not be chosen; empty if it would have been slower, or was not next in turn."""

    replica: int
    running: int
    waiting: int
    kv_tokens_left: int
    adapter: str
    placed: float | None
    ms_per_token: float
    step_ms: float
    queue_ms: float
    load_ms: float
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A decision, with the replicas as they were then. `again`: the replica chosen when the log is replayed;
    it differs from the original choice only if the log is from another version of loraplex. `why`: the
    router's criterion and how it applied here. `is_measured`: times come from a measured profile, not a
    guessed one. `is_elsewhere`: the replicas are servers behind --backend, which have no profile."""

    decision: Sent
    policy: str
    replicas: Sequence[ReplicaSeen]
    again: int
    why: str
    is_measured: bool
    is_elsewhere: bool


def explain(request: str | None, logs: Iterable[Sequence[RoutingEvent]]) -> list[Explanation]:
    """Return the decisions about a request, given its id or that of its call, from the latest log that has
    any; there are several if it was sent again, or if the call has several choices. The beginning of an id is
    enough if it is unambiguous. None means the call that was sent last.

    Return an empty list if no log has any. Raises UserError if several calls match.
    """
    for events in logs:
        sent = [event.request_id for event in events if isinstance(event, Sent)]
        if request is None:
            if sent:
                return list(_decisions(events, call_id_of(sent[-1])))
            continue
        if any(_belongs(each, request) for each in sent):
            return list(_decisions(events, request))
        begins = {call for call in map(call_id_of, sent) if request and call.startswith(request)}
        if len(begins) == 1:
            return list(_decisions(events, begins.pop()))
        if begins:
            some = ", ".join(sorted(begins)[:_MAX_NAMED])
            raise UserError(
                f"{request!r} begins the ids of {len(begins):,} calls, such as {some}; give more of it"
            )
    return []


def replayed(events: Sequence[RoutingEvent]) -> Iterator[tuple[Decision, Decision]]:
    """Yield every decision of a log, together with the one made in its replay."""
    routing = LiveRouting(events[:1])
    for event in events[1:]:
        again = routing.apply(event)
        if isinstance(event, Decision):
            assert again is not None
            yield event, again


def _decisions(events: Sequence[RoutingEvent], asked: str) -> Iterator[Explanation]:
    first, *others = events
    assert isinstance(first, Began)
    routing = LiveRouting([first])
    costs = json.loads(first.costs)
    for event in others:
        seen = None
        if isinstance(event, Sent) and _belongs(event.request_id, asked):
            seen = _seen(routing, event)
        again = routing.apply(event)
        if isinstance(event, Sent) and seen is not None:
            assert isinstance(again, Sent)
            yield Explanation(
                decision=event,
                policy=first.policy,
                replicas=seen,
                again=again.replica,
                why=_why(event, first.policy, seen),
                is_measured=bool(costs["measured"]),
                is_elsewhere=costs["subject"]["machine"] == ELSEWHERE,
            )


def _belongs(request_id: str, asked: str) -> bool:
    """Return whether this is the request, or a choice of the call: choices have the call's id and their
    number."""
    return asked in (request_id_of(request_id), call_id_of(request_id))


def _seen(routing: LiveRouting, decision: Sent) -> list[ReplicaSeen]:
    placed = None if decision.version is None else routing.placed_on(decision.version)
    shares = {} if placed is None else dict(zip(*placed, strict=True))
    view = routing.view
    request = routing.request_of(decision.version, decision.prompt_tokens)
    added = AddedCosts().of(request, view, view.load.replicas)
    load_s = view.load_s(request, view.load.replicas)
    token_s = added.decode_s + (added.queue_s + load_s) / view.load.output_left(request)
    has_room = view.load.has_room(request)
    rows = []
    for number in range(view.load.num_replicas):
        load = view.load.replica(number)
        if not view.load.accepts[number]:
            verdict = decision.rejected.get(number, "takes no requests")
        elif number == decision.replica:
            verdict = "migrated to" if decision.is_move else "chosen"
        elif not has_room[number]:
            verdict = "its KV memory is taken"
        else:
            verdict = ""
        rows.append(
            ReplicaSeen(
                replica=number,
                running=load.num_running,
                waiting=load.num_waiting,
                kv_tokens_left=int(load.kv_tokens_left),
                adapter=_place(routing, request.adapter, number),
                placed=round(shares[number], 3) if number in shares else None,
                ms_per_token=round(1e3 * float(token_s[number]), 3),
                step_ms=round(1e3 * float(added.decode_s[number]), 3),
                queue_ms=round(1e3 * float(added.queue_s[number]), 3),
                load_ms=round(1e3 * float(load_s[number]), 3),
                verdict=verdict,
            )
        )
    return rows


def _why(decision: Sent, policy: str, seen: Sequence[ReplicaSeen]) -> str:
    """Return in words why the router chose this replica."""
    if decision.is_move:
        return "it migrated there from a replica that was overloaded"
    able = [row for row in seen if row.verdict in ("", "chosen")]
    if len(able) == 1:
        return "no other one took requests and had room"
    routing = Policy.of_name(policy).routing
    if routing != "auto":
        return ROUTINGS_EXPLAINED[routing]
    chosen = seen[decision.replica]
    is_cheapest = chosen.ms_per_token <= min(row.ms_per_token for row in able)
    price = "is the cheapest" if is_cheapest else "costs the fleet little more than the cheapest"
    if chosen.adapter in _HOMES:
        return f"{_HOMES[chosen.adapter]}, and {price}"
    if chosen.placed is not None:
        return f"the placement gives it the adapter, and it {price}"
    return "it costs the fleet the least time per token, or as good as that"


def _place(routing: LiveRouting, adapter: int | None, replica: int) -> str:
    tiers = routing.view.tiers
    if adapter is None:
        return ""
    if replica in tiers.on_device(adapter):
        return "device"
    return "host" if replica in tiers.on_host(adapter) else "disk"
