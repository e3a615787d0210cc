"""The answers about models, adapters, what is asked of them, and tenants."""

from __future__ import annotations

from typing import Literal

import msgspec


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A base model (`parent` null) or an adapter (`parent` is the base model).

    `root` is its folder; only administrators see it.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "loraplex"
    root: str | None
    parent: str | None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]


class PreviousVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a name stood for, which may be rolled back to if its files are unchanged.

    `path` is the folder or repository that it was read from; only administrators see it.
    """

    version: str
    path: str | None


class CanaryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A version on trial. `requests`: requests answered since the start, including those of earlier canaries
    of the same name; null for a tenant that may not change the adapter. `path` is its folder; only
    administrators see it."""

    version: str
    share: float
    path: str | None
    rank: int
    bytes: int
    tier: str
    requests: int | None


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter. `version`, `rank`, `bytes`, `tier` and `loads` describe its weights, which several names
    may share; `in_flight`, `hits`, `requests` and `tokens` count this name's requests since the start,
    including its canary's; they are null for a tenant that may not change the adapter, as is `loads`.
    `previous`: versions that it stood for before, latest first.

    `bytes`: the memory that its weights take, in a fleet that of all replicas that have them; what one copy
    takes if none has, and for a tenant that is no operator. `held_by`: the replicas of a fleet that have its
    weights in memory, as far as known; `placed_on`: those that the placement gives it to, null if it gives
    every adapter to all. Both are null for a single engine, and for a tenant that is no operator.
    `path` is its folder, and `source` the folder or repository to load it from again; only administrators see
    them.
    """

    name: str
    version: str
    path: str | None
    source: str | None
    rank: int
    bytes: int
    tier: str
    held_by: list[int] | None
    placed_on: list[int] | None
    in_flight: int | None
    hits: int | None
    loads: int | None
    requests: int | None
    tokens: int | None
    canary: CanaryInfo | None
    previous: list[PreviousVersion]


class AdapterList(msgspec.Struct, frozen=True, kw_only=True):
    """`total`: number of adapters that the query matches, of which `data` may be a part."""

    object: Literal["list"] = "list"
    total: int
    data: list[AdapterInfo]


class AdapterDemandInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One served adapter. `requests`: answers that were asked for."""

    name: str
    rank: int
    requests: int


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The engines of a server, as profiles name them: by machine, device, the model's shape and dtype."""

    machine: str
    device: str
    model: str
    dtype: str
    num_layers: int


class DemandInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of the last half hour, or since the start: of the last `seconds`. `base_requests`: those
    for the base model alone, which are in none of the other figures. `prompt_tokens` and `output_tokens`:
    means of an answer for an adapter and of its prompt; null until there is one, or one was answered. A
    request for n answers counts n times, and so does its prompt, as each answer is a sequence of its own.
    `engine`: null for a front of servers that run elsewhere."""

    object: Literal["demand"] = "demand"
    seconds: float
    base_requests: int
    prompt_tokens: float | None
    output_tokens: float | None
    data: list[AdapterDemandInfo]
    engine: EngineInfo | None = None


class Attainment(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of requests that reached a target, and that did not."""

    attained: int
    missed: int


class TenantInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant: its rights, as the tenants file has them, and what it has used since the start. Limits and
    targets are null without one; `requests_left` and `tokens_left` are of the last minute. `slo_requests`:
    by target, `ttft` or `tpt`, those of its adapters included."""

    name: str
    adapters: list[str]
    base_model: bool
    administers: list[str]
    operator: bool
    metrics: bool
    share: float
    priority: int
    requests_per_minute: int | None
    requests_left: int | None
    tokens_per_minute: int | None
    tokens_left: int | None
    max_in_flight: int | None
    in_flight: int
    requests: int
    prompt_tokens: int
    generated_tokens: int
    refused: dict[str, int]
    slo_ttft: float | None
    slo_tpt: float | None
    slo_requests: dict[str, Attainment]


class TenantList(msgspec.Struct, frozen=True, kw_only=True):
    """The tenants that the sender may know of: itself, or all for an operator. `trouble`: why the tenants
    file as it is now is not in force; null if it is, and for all but operators."""

    object: Literal["list"] = "list"
    data: list[TenantInfo]
    trouble: str | None
