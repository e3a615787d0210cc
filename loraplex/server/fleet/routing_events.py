"""Everything that the routing of a fleet depends on, as events: what happened, in order, and what was
decided.

A router decides by what was reported to it before, so the same events lead to the same decisions again: in
`fleet explain`, and in tests.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loraplex.core.continuation import request_id_of
from loraplex.core.tenants import NO_TENANT
from loraplex.fleet.replanner import PERIOD_S


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Base of all events: a JSON object that names its kind."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a replica (`fleet.load.ReplicaLimits`)."""

    max_running: int
    kv_tokens: int
    max_adapters: int | None = None


class PlacedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter's part of a placement plan (`fleet.plan.Entry`)."""

    version: str
    replicas: tuple[int, ...]
    shares: tuple[float, ...]


class PendingAdapter(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a plan that waits until replicas have the adapter (`fleet.plan_change.Pending`)."""

    placed: PlacedAdapter
    waiting: list[int]
    failed: list[int] = []


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A request that should continue on another replica (`fleet.migration.problem.Move`)."""

    request_id: str
    source: int
    target: int


class Began(_Event, frozen=True, tag="began"):
    """The routing began, or begins again with the events up to the next request. `policy`: its name;
    `period_s`: period of its placement in seconds. `costs`: the cost model of a replica, as a profile.
    `mean_tokens`: the expected length of an answer. `device_bytes`: memory shared by adapters and KV cache on
    each replica; None if they share none. `now_s`: the time on the clock that `Ticked` uses."""

    policy: str
    limits: list[Limits]
    costs: str
    mean_tokens: float
    period_s: float = PERIOD_S
    device_bytes: int | None = None
    now_s: float = 0.0


class AdapterKnown(_Event, frozen=True, tag="adapter"):
    """An adapter was added, or added again."""

    version: str
    rank: int
    num_bytes: int


class AdapterRemoved(_Event, frozen=True, tag="adapter_removed"):
    version: str


class Joined(_Event, frozen=True, tag="joined"):
    """A replica joined: under the next number, or in place of one that has left."""

    replica: int
    limits: Limits


class Accepts(_Event, frozen=True, tag="accepts"):
    """A replica takes requests from now on, or none."""

    replica: int
    accepts: bool


class Holds(_Event, frozen=True, tag="holds"):
    """A replica reports where it has an adapter."""

    replica: int
    version: str
    on_device: bool = False
    on_host: bool = False


class Lost(_Event, frozen=True, tag="lost"):
    """A replica is down and has lost all adapters."""

    replica: int


class Open(_Event, frozen=True, tag="open"):
    """A request that was sent before the routing began again and has not ended. `tenant`: whose it is."""

    request_id: str
    replica: int
    prompt_tokens: int
    version: str | None = None
    is_running: bool = False
    tenant: str = NO_TENANT


class Sent(_Event, frozen=True, tag="sent"):
    """A decision: a request was sent to this replica. `at_unix_s`: the time, for people. `is_move`: it
    migrates to this replica, so there was nothing to choose. `rejected`: why others could not be chosen, if
    more is known than that they accept no requests. `tenant`: whose it is."""

    request_id: str
    replica: int
    prompt_tokens: int
    version: str | None = None
    at_unix_s: float = 0.0
    is_move: bool = False
    rejected: dict[int, str] = {}
    tenant: str = NO_TENANT


class FirstToken(_Event, frozen=True, tag="first_token"):
    request_id: str


class Ended(_Event, frozen=True, tag="ended"):
    """A request ended. `output_tokens`: None if it was not answered completely."""

    request_id: str
    output_tokens: int | None = None


class Ticked(_Event, frozen=True, tag="ticked"):
    """A decision: adapters are placed again, or requests move. `serving`: the replicas that take requests.
    `num_output`: output tokens so far, if requests may move. `placed`: entries that differ from the previous
    plan. `stages`: number of adapter copies that replicas have to load for it."""

    now_s: float
    serving: list[int]
    num_output: dict[str, int] = {}
    placed: list[PlacedAdapter] = []
    stages: int = 0
    moves: list[Moved] = []


class Given(_Event, frozen=True, tag="given"):
    """A placement was given for these adapters, which replaces the one given before; none: the policy places
    all of them again."""

    placed: list[PlacedAdapter]


class Staged(_Event, frozen=True, tag="staged"):
    """A replica has loaded an adapter for a plan, or could not."""

    replica: int
    version: str
    is_there: bool


class PlanState(_Event, frozen=True, tag="plan"):
    """The state that a routing which begins again continues with (`fleet.live_controller.ControllerState`).
    `plan` and `target`: None before the first plan. `rates`: tokens/s in the last periods, of adapters with
    requests. `given`: the entries that are kept whatever the policy says."""

    since_s: float
    place_s: float | None
    has_counts: bool
    serving: list[int]
    plan: list[PlacedAdapter] | None
    target: list[PlacedAdapter] | None
    pending: list[PendingAdapter]
    num_periods: int
    tokens: dict[str, float]
    rates: dict[str, list[float]]
    migrate_s: float | None
    moved_s: dict[str, float]
    executed_s: tuple[float, float]
    prefill_s: tuple[float, float]
    output_token_s: float
    given: list[PlacedAdapter] = []
    is_given_pending: bool = False


Decision = Sent | Ticked
RoutingEvent = (
    Began
    | AdapterKnown
    | AdapterRemoved
    | Joined
    | Accepts
    | Holds
    | Lost
    | Open
    | Sent
    | FirstToken
    | Ended
    | Ticked
    | Given
    | Staged
    | PlanState
)


def call_id_of(request_id: str) -> str:
    """Return the id of the call that a request is a choice of: a request id is the call's id and a number."""
    return request_id_of(request_id).rpartition("-")[0]


_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[RoutingEvent]] = msgspec.json.Decoder(RoutingEvent)

encode_event: Final = _encoder.encode
decode_event: Final = _decoder.decode
