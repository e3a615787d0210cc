"""A request while it is in the engine."""

from __future__ import annotations

from typing import NamedTuple

from loraplex.core.request import EngineRequest
from loraplex.core.tenants import BATCH_PRIORITY
from loraplex.scheduling.plan import Chunk


class RequestState:
    """Mutable state of one request.

        tokens   [ prompt ............ | output ...... | unknown ]
        computed [ cached | computed ....... )                     keys and values are in `block_ids`
        published[ whole blocks .... )                             findable by other requests

    *Unknown* tokens are being sampled by steps in flight, and what such steps compute counts as computed.
    `num_resets`: how often the sequence was preempted; a step decided before a preemption publishes nothing.
    `pinned`: the adapter table holds the adapter's weights for this sequence. `num_cached`: prompt tokens the
    prefix cache had when the request was first admitted; None until then. `adapter_hit`: its adapter was
    resident or loading when the request first pinned it; None until then. `queue_position`: position in the
    waiting queue; smaller numbers run first. `arrival`: number of requests that arrived before. `arrived_s`:
    sum of the predicted seconds of all steps before its arrival; `delayed_s`: predicted seconds of steps that
    it was left out of; `lag_s`: by how much its place is behind (`batching.place_lags`). `queued_s`: time of
    its arrival, by the scheduler's clock; `slo_ttft_s`: seconds after it until when its first token should
    come; `slo_tpt_s`: those that each later one should take. `num_charged`: tokens that its tenant was
    charged for (`fair_share`).
    """

    __slots__ = (
        "adapter",
        "adapter_hit",
        "arrival",
        "arrived_s",
        "block_ids",
        "delayed_s",
        "lag_s",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_prompt",
        "num_published",
        "num_resets",
        "num_unknown",
        "pinned",
        "queue_position",
        "queued_s",
        "request",
        "request_id",
        "slo_tpt_s",
        "slo_ttft_s",
        "token_ids",
    )

    def __init__(
        self, request: EngineRequest, arrival: int = 0, arrived_s: float = 0.0, queued_s: float = 0.0
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.adapter = request.adapter
        self.adapter_hit: bool | None = None
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_cached: int | None = None
        self.num_published = 0
        self.num_resets = 0
        self.num_unknown = 0
        self.block_ids: list[int] = []
        self.pinned = False
        self.queue_position = 0
        self.arrival = arrival
        self.arrived_s = arrived_s
        self.delayed_s = 0.0
        self.lag_s = 0.0
        self.queued_s = queued_s
        self.slo_ttft_s: float | None = None
        self.slo_tpt_s: float | None = None
        self.num_charged = 0

    @property
    def is_line(self) -> bool:
        """Return whether it is a line of a batch, which comes after all live requests."""
        return self.request.priority >= BATCH_PRIORITY

    @property
    def turn(self) -> tuple[int, int]:
        """Its place among all requests, running or not, where batching policies displace running ones."""
        return self.request.priority, self.arrival

    @property
    def num_tokens(self) -> int:
        """Number of tokens, known and unknown."""
        return len(self.token_ids) + self.num_unknown

    @property
    def num_remaining(self) -> int:
        """Number of tokens whose keys and values are not computed yet; 1 for a decoding sequence."""
        return len(self.token_ids) + self.num_unknown - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def num_left(self, max_model_len: int) -> int:
        """Return the most tokens that it may still sample, at least 1."""
        max_tokens = self.request.params.max_tokens
        limit = max_model_len if max_tokens is None else min(max_model_len, self.num_prompt + max_tokens)
        return max(limit - self.num_tokens, 1)

    def next_chunk(self, num_tokens: int) -> Chunk:
        start, end = self.num_computed, self.num_computed + num_tokens
        samples = end == len(self.token_ids) + self.num_unknown
        return Chunk(self.request_id, self.adapter, start, self.token_ids[start:end], self.block_ids, samples)

    def needs_no_more(self, max_model_len: int) -> bool:
        """Return whether the tokens in flight reach the length limit, so that no more steps are needed."""
        if self.num_unknown == 0:
            return False
        limit, max_tokens = max_model_len, self.request.params.max_tokens
        if max_tokens is not None:
            limit = min(limit, self.num_prompt + max_tokens)
        return self.num_tokens >= limit

    def stops_at(self, token_id: int) -> bool:
        """Return whether the sequence ends if this token is sampled next."""
        params, eos_token_ids = self.request.params, self.request.eos_token_ids
        if token_id not in params.stop_token_ids and (params.ignore_eos or token_id not in eos_token_ids):
            return False
        return self.num_output + 1 > params.min_tokens

    def reset(self) -> None:
        """Set the sequence back to nothing computed; the caller has released its blocks."""
        self.block_ids = []
        self.num_computed = 0
        self.num_published = 0
        self.num_resets += 1


class ChunkUnderWay(NamedTuple):
    """A chunk of a step in flight: its sequence, `num_resets` of that when it was decided, and whether it
    samples."""

    sequence: RequestState
    num_resets: int
    samples: bool
