"""Chooses the tokens of a step's requests, on the device wherever that needs the logits only.

A step writes the likeliest token of every row itself. Here those of requests that draw theirs, or that need
the host (`engine.sampler`), are replaced: in the step's output, and where the next step finds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from loraplex.core.request import EngineRequest, TokenLogprob
from loraplex.engine.cuda.device_sampler import draw_tokens, stays_on_device
from loraplex.engine.cuda.seats import Seats
from loraplex.engine.cuda.small_copies import SmallCopies
from loraplex.engine.cuda.step_runner import StepOutput
from loraplex.engine.sampler import SamplingState, sample


class TokenChoice:
    """Chooses tokens for one engine. `states`: the sampling state of every request in it, by id."""

    def __init__(self, last_tokens: torch.Tensor, seats: Seats, copies: SmallCopies) -> None:
        """`last_tokens`: by seat, the token that the next step follows."""
        self._last_tokens = last_tokens
        self._seats = seats
        self._copies = copies
        self.states: dict[str, SamplingState] = {}

    def begin(self, request: EngineRequest) -> None:
        self.states[request.request_id] = SamplingState(request)

    def end(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self.states.pop(request_id, None)

    def choose(self, sampling: Mapping[str, int], output: StepOutput) -> tuple[dict[str, TokenLogprob], bool]:
        """Replace the greedy tokens of requests that are not greedy, or need the host. `sampling`: the logit
        row of each request (`BuiltBatch`).

        Return log-probabilities, and whether all tokens were chosen on the device.
        """
        drawn: list[tuple[int, str]] = []
        by_host: list[tuple[int, str]] = []
        for request_id, row in sampling.items():
            state = self.states[request_id]
            if not stays_on_device(state):
                by_host.append((row, request_id))
                continue
            if not state.params.greedy:
                drawn.append((row, request_id))
        if drawn:
            rows = self._copies.integers([row for row, _ in drawn])
            states = [self.states[request_id] for _, request_id in drawn]
            tokens_L = draw_tokens(output.logits_LV[rows], states, self._copies)
            self._replace(output, rows, tokens_L, [request_id for _, request_id in drawn])
        logprobs = self._choose_by_host(output, by_host) if by_host else {}
        for request_id in sampling.keys() - {request_id for _, request_id in by_host}:
            self.states[request_id].num_output += 1
        return logprobs, not by_host

    def _choose_by_host(
        self, output: StepOutput, by_host: Sequence[tuple[int, str]]
    ) -> dict[str, TokenLogprob]:
        rows = self._copies.integers([row for row, _ in by_host])
        states = [self.states[request_id] for _, request_id in by_host]
        logprobs: dict[str, TokenLogprob] = {}
        tokens = []
        logits_LV = self._copies.to_host_now(output.logits_LV[rows])
        for (_, request_id), state, chosen in zip(by_host, states, sample(logits_LV, states), strict=True):
            tokens.append(0 if chosen.token_id is None else chosen.token_id)
            if chosen.token_id is not None:
                state.accept(chosen.token_id)
            if chosen.logprob is not None:
                logprobs[request_id] = chosen.logprob
        self._replace(output, rows, self._copies.integers(tokens), [request_id for _, request_id in by_host])
        return logprobs

    def _replace(
        self, output: StepOutput, rows: torch.Tensor, tokens_L: torch.Tensor, request_ids: Sequence[str]
    ) -> None:
        output.tokens_L2[:, 0].index_copy_(0, rows, tokens_L)
        seats = self._copies.integers([self._seats[request_id] for request_id in request_ids])
        self._last_tokens.index_copy_(0, seats, tokens_L)
