"""All that the routing of a fleet depends on, as events: what happened, in its order, and what was decided.

A router decides by what it was told before, so that the same events lead to the same decisions again: in
`fleet explain`, and in tests.
"""

from __future__ import annotations

from typing import Final

import msgspec


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Base of all events: an object of JSON that names its kind."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of a replica (`fleet.load.ReplicaLimits`)."""

    max_running: int
    kv_tokens: int
    max_adapters: int | None = None


class Began(_Event, frozen=True, tag="began"):
    """The routing began, or begins anew with what follows up to the next request. `costs`: the cost model of
    a replica, as a profile. `mean_tokens`: the length of an answer that is expected."""

    routing: str
    limits: list[Limits]
    costs: str
    mean_tokens: float


class AdapterKnown(_Event, frozen=True, tag="adapter"):
    version: str
    rank: int
    num_bytes: int


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


class Open(_Event, frozen=True, tag="open"):
    """A request that was sent before the routing began anew and has not ended."""

    request_id: str
    replica: int
    prompt_tokens: int
    version: str | None = None
    is_running: bool = False


class Sent(_Event, frozen=True, tag="sent"):
    """A decision: a request was sent to this replica. `at_unix_s`: the time, for people."""

    request_id: str
    replica: int
    prompt_tokens: int
    version: str | None = None
    at_unix_s: float = 0.0


class FirstToken(_Event, frozen=True, tag="first_token"):
    request_id: str


class Ended(_Event, frozen=True, tag="ended"):
    """A request ended. `output_tokens`: None if it was not answered in full."""

    request_id: str
    output_tokens: int | None = None


RoutingEvent = Began | AdapterKnown | Accepts | Holds | Open | Sent | FirstToken | Ended

_encoder: Final = msgspec.json.Encoder()
_decoder: Final[msgspec.json.Decoder[RoutingEvent]] = msgspec.json.Decoder(RoutingEvent)

encode_event: Final = _encoder.encode
decode_event: Final = _decoder.decode
