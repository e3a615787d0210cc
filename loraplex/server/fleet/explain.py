"""Why a request went where it went: its decision, made once more from the log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from loraplex.core.continuation import request_id_of
from loraplex.core.errors import UserError
from loraplex.fleet.routers.added_costs import added_costs
from loraplex.server.fleet.live_routing import LiveRouting
from loraplex.server.fleet.routing_events import Began, Decision, RoutingEvent, Sent, call_id_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSeen:
    """One replica as the router saw it. `adapter`: the tier that has the request's: device, host or disk.
    `placed`: the share of the adapter's requests that the placement gives it; None if it gives it none, or
    every replica serves every adapter.
    `step_ms`: a decode step there with the request; `queue_ms`: the prompts before it; `load_ms`: until it
    has the adapter. `verdict`: chosen, migrated to, or why it could not be; nothing if it would have been
    slower, or its turn comes later."""

    replica: int
    running: int
    waiting: int
    kv_tokens_left: int
    adapter: str
    placed: float | None
    step_ms: float
    queue_ms: float
    load_ms: float
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A decision, with the replicas as they were then. `again`: the replica that is chosen when the log is
    replayed; another one than was chosen only if the log is of another version of loraplex."""

    decision: Sent
    policy: str
    replicas: Sequence[ReplicaSeen]
    again: int


def explain(request: str, logs: Iterable[Sequence[RoutingEvent]]) -> list[Explanation]:
    """Return the decisions about a request, by its id or by that of the call it belongs to, of the latest log
    that has any; several if it was sent again, or if the call has several choices.

    Raises UserError if no log has any.
    """
    for events in logs:
        if found := list(_decisions(events, request)):
            return found
    raise UserError(
        f"no decision about {request!r} is in the log; it holds the latest ones only, by the `id` in the "
        "body of the answer"
    )


def replayed(events: Sequence[RoutingEvent]) -> Iterator[tuple[Decision, Decision]]:
    """Yield every decision of a log, and the one that is made when it is replayed."""
    routing = LiveRouting(events[:1])
    for event in events[1:]:
        again = routing.apply(event)
        if isinstance(event, Decision):
            assert again is not None
            yield event, again


def _decisions(events: Sequence[RoutingEvent], asked: str) -> Iterator[Explanation]:
    if not any(isinstance(event, Sent) and _belongs(event.request_id, asked) for event in events):
        return
    first, *others = events
    assert isinstance(first, Began)
    routing = LiveRouting([first])
    for event in others:
        seen = None
        if isinstance(event, Sent) and _belongs(event.request_id, asked):
            seen = _seen(routing, event)
        again = routing.apply(event)
        if isinstance(event, Sent) and seen is not None:
            assert isinstance(again, Sent)
            yield Explanation(decision=event, policy=first.policy, replicas=seen, again=again.replica)


def _belongs(request_id: str, asked: str) -> bool:
    """Tell whether this is the request, or a choice of the call: those have its id and their number."""
    return asked in (request_id_of(request_id), call_id_of(request_id))


def _seen(routing: LiveRouting, decision: Sent) -> list[ReplicaSeen]:
    placed = None if decision.version is None else routing.placed_on(decision.version)
    shares = {} if placed is None else dict(zip(*placed, strict=True))
    view = routing.view
    request = routing.request_of(decision.version, decision.prompt_tokens)
    added = added_costs(request, view, view.load.replicas)
    load_s = view.load_s(request, view.load.replicas)
    has_room = view.load.has_room(request)
    rows = []
    for number in range(view.load.num_replicas):
        load = view.load.replica(number)
        if not view.load.accepts[number]:
            verdict = "takes no requests"
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
                step_ms=round(1e3 * float(added.decode_s[number]), 3),
                queue_ms=round(1e3 * float(added.queue_s[number]), 3),
                load_ms=round(1e3 * float(load_s[number]), 3),
                verdict=verdict,
            )
        )
    return rows


def _place(routing: LiveRouting, adapter: int | None, replica: int) -> str:
    tiers = routing.view.tiers
    if adapter is None:
        return ""
    if replica in tiers.on_device(adapter):
        return "device"
    return "host" if replica in tiers.on_host(adapter) else "disk"
