"""Chooses the tokens of a step's requests, on the device wherever that needs the logits only.

A step writes the likeliest token of every row itself. Here those of requests that draw theirs, whose answers
have a grammar, or that need the host (`engine.sampler`), are replaced: in the step's output, and where the
next step finds them.

Which tokens a grammar allows depends on the token of the step before, which the host learns only now: it
waits for that step and computes the masks while the device is busy with this one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from loraplex.core.request import EngineRequest, TokenLogprob
from loraplex.engine.cuda.device_sampler import draw_tokens, stays_on_device
from loraplex.engine.cuda.seats import Seats
from loraplex.engine.cuda.small_copies import SmallCopies
from loraplex.engine.cuda.step_runner import StepOutput
from loraplex.engine.cuda.streams import Moment
from loraplex.engine.grammars import AnswerGrammar, allowed_bits
from loraplex.engine.sampler import SamplingState, allowed_by_row, as_booleans, sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Log-probabilities of a step's tokens, requests that have no token and why, with the field at fault, and
    whether all tokens were chosen on the device."""

    logprobs: dict[str, TokenLogprob] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    failed_params: dict[str, str] = field(default_factory=dict)
    on_device: bool = True


class TokenChoice:
    """Chooses tokens for one engine. `states`: the sampling state of every request in it, by id."""

    def __init__(self, last_tokens: torch.Tensor, seats: Seats, copies: SmallCopies) -> None:
        """`last_tokens`: by seat, the token that the next step follows."""
        self._last_tokens = last_tokens
        self._seats = seats
        self._copies = copies
        self.states: dict[str, SamplingState] = {}
        self._with_grammar: list[tuple[str, SamplingState]] = []
        """Requests whose grammars have not read their last token, which was chosen on the device. By their
        states too: another request may have the id of one that has ended."""
        self._last: tuple[Mapping[str, int], torch.Tensor, Moment] | None = None
        """The tokens of the last step on the host: their places by request, and when they are there."""

    def begin(self, request: EngineRequest, grammar: AnswerGrammar | None = None) -> None:
        self.states[request.request_id] = SamplingState(request, grammar)

    def end(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        self.states.pop(request_id, None)

    def choose(self, sampling: Mapping[str, int], output: StepOutput) -> Chosen:
        """Replace the greedy tokens of requests that are not greedy, have a grammar, or need the host.
        `sampling`: the logit row of each request (`BuiltBatch`)."""
        self._read_last()
        found = Chosen()
        likeliest: list[str] = []
        drawn: list[str] = []
        by_host: list[str] = []
        for request_id in sampling:
            state = self.states[request_id]
            if state.grammar is not None and state.grammar.error is not None:
                found.failures[request_id] = state.grammar.error
                found.failed_params[request_id] = state.grammar.param
            elif not stays_on_device(state):
                by_host.append(request_id)
            elif not state.params.greedy:
                drawn.append(request_id)
            elif state.grammar is not None:
                likeliest.append(request_id)
        if likeliest or drawn:
            self._choose_on_device(sampling, output, likeliest, drawn)
        chosen = [(each, self.states[each]) for each in (*likeliest, *drawn)]
        self._with_grammar = [each for each in chosen if each[1].grammar is not None]
        if by_host:
            found.logprobs.update(self._choose_by_host(sampling, output, by_host))
        for request_id in sampling.keys() - set(by_host):
            self.states[request_id].num_output += 1
        return replace(found, on_device=not by_host)

    def sent(self, request_ids: Sequence[str], tokens_L2: torch.Tensor, done: Moment) -> None:
        """Note where the host finds the tokens of the step just launched, once it is done."""
        self._last = {each: place for place, each in enumerate(request_ids)}, tokens_L2, done

    def _read_last(self) -> None:
        """Let grammars read the tokens of the step before."""
        waiting = [each for each in self._with_grammar if self.states.get(each[0]) is each[1]]
        if not waiting:
            return
        assert self._last is not None
        places, tokens_L2, done = self._last
        done.wait()
        for request_id, state in waiting:
            token_id, is_finite = tokens_L2[places[request_id]].tolist()
            assert state.grammar is not None
            if is_finite:
                state.grammar.accept(token_id)

    def _choose_on_device(
        self, sampling: Mapping[str, int], output: StepOutput, likeliest: Sequence[str], drawn: Sequence[str]
    ) -> None:
        request_ids = [*likeliest, *drawn]
        states = [self.states[request_id] for request_id in request_ids]
        rows = self._copies.integers([sampling[request_id] for request_id in request_ids])
        logits_LV = output.logits_LV[rows]
        grammars = {row: state.grammar for row, state in enumerate(states) if state.grammar is not None}
        if grammars:
            bits = self._copies.to_device(torch.from_numpy(allowed_bits(list(grammars.values()))))
            with_grammar = self._copies.integers(list(grammars))
            forbidden = ~as_booleans(bits, logits_LV.shape[1])
            logits_LV[with_grammar] = logits_LV[with_grammar].masked_fill(forbidden, -torch.inf)
        num_likeliest = len(likeliest)
        tokens_L = logits_LV[:num_likeliest].argmax(dim=-1)
        if drawn:
            drawn_L = draw_tokens(logits_LV[num_likeliest:], states[num_likeliest:], self._copies)
            tokens_L = torch.cat([tokens_L, drawn_L])
        self._replace(output, rows, tokens_L, request_ids)

    def _choose_by_host(
        self, sampling: Mapping[str, int], output: StepOutput, by_host: Sequence[str]
    ) -> dict[str, TokenLogprob]:
        rows = self._copies.integers([sampling[request_id] for request_id in by_host])
        states = [self.states[request_id] for request_id in by_host]
        logprobs: dict[str, TokenLogprob] = {}
        tokens = []
        allowed = allowed_by_row(states, output.logits_LV.shape[1])
        logits_LV = self._copies.to_host_now(output.logits_LV[rows])
        for request_id, state, chosen in zip(
            by_host, states, sample(logits_LV, states, allowed), strict=True
        ):
            tokens.append(0 if chosen.token_id is None else chosen.token_id)
            if chosen.token_id is not None:
                state.accept(chosen.token_id)
            if chosen.logprob is not None:
                logprobs[request_id] = chosen.logprob
        self._replace(output, rows, self._copies.integers(tokens), by_host)
        return logprobs

    def _replace(
        self, output: StepOutput, rows: torch.Tensor, tokens_L: torch.Tensor, request_ids: Sequence[str]
    ) -> None:
        output.tokens_L2[:, 0].index_copy_(0, rows, tokens_L)
        seats = self._copies.integers([self._seats[request_id] for request_id in request_ids])
        self._last_tokens.index_copy_(0, seats, tokens_L)
