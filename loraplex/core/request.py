"""Requests to an engine and its outputs, in tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraplex.core.sampling import SamplingParams
from loraplex.core.tenants import NO_TENANT


class FinishReason(StrEnum):
    """The reason a request ended; the first two are OpenAI's terms."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """One sequence to generate. `adapter` is an adapter version (content hash), None for the base.

    `output_token_ids`: the beginning of the answer, made by an earlier engine. It counts as output, for
    lengths, penalties and seeds, and is not reported again. `tenant`: whose request it is. `priority`: of a
    tenant's requests, those with a lower one come first. `slo_ttft_s`: seconds within which its first token
    should come, `slo_tpt_s`: those that each later one should take at most; None for the target of the
    tenant, if it has one. `cache_salt`: a request finds cached
    prefixes and compiled grammars only of requests with the same one. `traceparent`: its
    place in a trace, if it is traced: its first token then comes with its `PhaseTimes`.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()
    tenant: str = NO_TENANT
    priority: int = 0
    slo_ttft_s: float | None = None
    slo_tpt_s: float | None = None
    cache_salt: str = ""
    traceparent: str = ""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the first new output token."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """A token, its log-probability, and the most likely tokens at its position (best first)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTimes:
    """Seconds from a request's phases to its first token: from when it was queued, and began to run, and when
    the load of its adapter began and ended; None if it met none. Times of day would not do: clocks differ
    between machines."""

    queued_s: float
    started_s: float | None
    load_begun_s: float | None
    load_ended_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOutput:
    """The output of one step for one request. A request's last output has a `finish_reason`.

    `logprobs` has one entry per new token if requested. `prompt_logprobs` is set once, with the first token:
    one entry per prompt token (None for the first, which has nothing before it). `stop_token_id` is the stop
    token that ended the request, if one did; it is never in `token_ids`. `adapter_hit` says whether the
    request found its adapter resident or being loaded; None for the base. `error_param` is "model" if the
    adapter caused the failure: its files are gone, changed or broken, or its weights overflow; another field
    of the request if that one cannot be served. `times`: set once, with the first token of a traced request.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    num_cached_tokens: int = 0
    adapter_hit: bool | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    error_param: str | None = None
    times: PhaseTimes | None = None
