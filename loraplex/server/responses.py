"""The bodies that the server answers with. These structs are encoded and shown in the OpenAPI document.

Answers of routes that generate are in `generation_responses.py`, those about adapters and tenants in
`adapter_responses.py`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from loraplex.server.shadow_messages import Figures


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every answer that is not a success."""

    error: ErrorDetail


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One replica. `state`: new, starting, ready, silent, restarting, unreachable or failed; `message` says
    why it is not ready, why it refuses adapters, or by how much they exceed its memory. `placed`: number of
    adapters that the placement gives it, except those it refuses; `refused`: number of adapters it refuses;
    `brought`: number of adapters it has ever loaded because of a placement. In these, names of one version
    count once. `migrated`: number of requests that ever migrated to it. `drained`: an operator stopped
    sending it requests. `pid`: of its engine process, on the machine `node` if that is not the server's own;
    for a server that runs elsewhere, `node` is its URL."""

    replica: int
    state: str
    message: str
    drained: bool
    in_flight: int
    sent: int
    placed: int
    refused: int
    brought: int
    migrated: int
    restarts: int
    pid: int | None
    node: str | None


class LeftOutInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that could not be read, or that no replica accepted, at the start; it is tried again."""

    name: str
    reason: str


class NamedAdapters(msgspec.Struct, frozen=True, kw_only=True):
    """A number of adapters, and the first of their names."""

    number: int = 0
    first: list[str] = []


class AppliedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The placement that the fleet was given. `since_s`: when, in seconds since 1970; `adapters`: how many it
    places. `trouble`: why it is not in force, though it was before the server started; null if it is.

    The rest is what of it does not hold: `missing_replicas` of it that do not serve or are gone, and
    `new_replicas` that it does not use; adapters `not_in_it`, which the policy places; adapters in it that
    are `not_served` at present; and those `not_there` where it has them (yet)."""

    name: str | None
    since_s: float | None
    adapters: int
    trouble: str | None
    missing_replicas: list[int] = []
    new_replicas: list[int] = []
    not_in_it: NamedAdapters = NamedAdapters()
    not_served: NamedAdapters = NamedAdapters()
    not_there: NamedAdapters = NamedAdapters()


class ReplicaList(msgspec.Struct, frozen=True, kw_only=True):
    """`left_out`: adapters of the registry and of folders that are not served. `plan`: the placement that the
    fleet was given; null if its policy places all adapters."""

    object: Literal["list"] = "list"
    data: list[ReplicaInfo]
    left_out: list[LeftOutInfo] = []
    plan: AppliedPlan | None = None


class PlacedAdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of one adapter; several names may have one `version`. `replicas`: null if every replica
    serves every adapter. `given`: the replicas that it was given; null if the policy places it. `waiting`:
    replicas that are to load it before its requests go there; if there are none and `given` differs from
    `replicas`, they could not, or do not serve at present."""

    name: str
    version: str
    rank: int
    bytes: int
    replicas: list[int] | None
    given: list[int] | None
    waiting: list[int]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """`is_given`: a placement was handed to the fleet; otherwise its policy places all adapters. `stands`:
    every adapter is where it was given. `replicas`: all replicas of the fleet. `plan`: what was given, in
    short."""

    object: Literal["placement"] = "placement"
    is_given: bool
    stands: bool
    replicas: list[int]
    data: list[PlacedAdapterInfo]
    plan: AppliedPlan | None = None


class HistorySample(msgspec.Struct, frozen=True, kw_only=True):
    """The server at one time. Rates and latencies are those of the seconds before, null if there was nothing
    to measure; 95th percentiles are read off histograms. `waiting`: requests without their first token;
    `running`: those that have it."""

    at_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    requests_per_s: float
    ttft_s: float | None
    ttft_p95_s: float | None
    itl_s: float | None
    itl_p95_s: float | None
    waiting: int
    running: int


AdapterChangeKind = Literal["added", "switched", "removed", "loaded", "evicted"]


class AdapterChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one adapter. `added`, `switched` (to another version) and `removed` are about its name;
    `loaded` and `evicted` are about its weights: `tier` is where they are then, if known, and `replica` the
    one of a fleet that loaded or evicted them."""

    at_s: float
    name: str
    kind: AdapterChangeKind
    tier: str | None
    replica: int | None


class AdapterMap(msgspec.Struct, frozen=True, kw_only=True):
    """The places of all adapters, in the order of their names. `tiers`: one letter each: `d`evice, `l`oading
    to it, `h`ost or `-` for disk. `held`: of each replica of a fleet, the positions of the adapters that it
    has in memory; null for a single engine. `etag` changes with them."""

    etag: str
    tiers: str
    held: list[list[int]] | None


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the engine, or of all replicas. Without a GPU the device has none."""

    kv_blocks: int
    kv_blocks_used: int
    host_adapter_bytes: int
    host_adapter_budget_bytes: int
    device_adapter_bytes: int
    device_arena_bytes: int


class TwinPicture(msgspec.Struct, frozen=True, kw_only=True):
    """The last minutes as measured, and as the shadow twin predicts them; both null without a recent replay.
    `is_measured`: the twin goes by a measured profile, not by a guess."""

    is_measured: bool
    num_requests: int
    measured: Figures | None
    predicted: Figures | None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A server at a glance, for its web page. `process`: another one has another clock.
    `now_s`: the time on the clock of all `at_s`. `has_chat`: the model has a
    chat template. `uses_base`: the client may send requests to the base model; `may_change`: it may load and
    unload adapters; if not, it can with another key if `has_admin_key`. `state` and `message`: of the engine.
    `tiers`: number of adapters by tier. `map`: null if it is the one that the client named. `samples`,
    `changes`: those after the ones that the client has.

    A tenant sees its adapters only. `engine`, `samples` and `twin` are for those who may read all metrics;
    `left_out`, `replicas` (null for a single engine) and `num_plans` (number of times that the placement of a
    fleet has changed; null without a placement) for operators."""

    model: str
    version: str
    process: str
    now_s: float
    state: str
    message: str
    max_model_len: int
    has_chat: bool
    uses_base: bool
    may_change: bool
    has_admin_key: bool
    num_adapters: int
    tiers: dict[str, int]
    engine: EngineFigures | None
    map: AdapterMap | None
    samples: list[HistorySample]
    changes: list[AdapterChange]
    left_out: list[LeftOutInfo]
    replicas: list[ReplicaInfo] | None
    num_plans: int | None
    twin: TwinPicture | None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """`message`: a problem that does not keep requests from being served."""

    status: Literal["ok"] = "ok"
    message: str | msgspec.UnsetType = msgspec.UNSET


class NotReady(msgspec.Struct, frozen=True, kw_only=True):
    """`status`: the state of the engine; `phase`: the current phase of its start, and `fraction` the part of
    it that is done."""

    error: ErrorDetail
    status: str
    phase: str | None
    fraction: float | None
