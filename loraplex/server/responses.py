"""The bodies that the server answers with. These structs are encoded and shown in the OpenAPI document.

Stream chunks are written by hand in `chat_format.py` and `completion_format.py`, for speed.
"""

from __future__ import annotations

from typing import Any, Literal

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


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`adapter_version`: the content hash of the adapter that answered; absent for the base model.
    `reproducible`: false if the request had a seed and its answer was continued elsewhere with different
    random draws; otherwise absent."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    adapter_version: str | msgspec.UnsetType = msgspec.UNSET
    reproducible: bool | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatTokenLogprob]


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class AnsweredCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null only beside calls. `tool_calls` and `reasoning_content` are present where there are
    any."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[AnsweredCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """`rank`: 1 for the likeliest token; null for one that is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The tokens of a prompt, each with tokens by id: its own and the likeliest; null for the first."""


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`stop_reason` is the stop string or stop token that ended the choice, if one did. `token_ids` is there
    with `return_token_ids`."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of /v1/responses. `output`: reasoning, messages and calls. Nothing is stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None = None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: None = None
    store: bool = False
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: dict[str, Any] | None
    user: str | None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Parallel lists, one entry for each token; null for the first token of an echoed prompt.

    With `return_tokens_as_token_ids` tokens are given by id (`token_id:42`) instead of text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Choices are numbered prompt by prompt: n for the first prompt, then n for the next.

    `prompt_token_ids` and `token_ids` are present with `return_token_ids`; `token_ids` includes the stop
    token, if any.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


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
    would take if none has. `held_by`: the replicas of a fleet that have its weights in memory, as far as
    known; `placed_on`: those that the placement gives it to, null if it gives every adapter to all. Both are
    null for a single engine, and for a tenant that is no operator.
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
