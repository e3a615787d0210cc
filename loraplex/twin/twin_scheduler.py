"""The scheduler of a simulated engine: steps land without an update for every token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from loraplex.scheduling.plan import StepPlan, TokenUpdate
from loraplex.scheduling.request_state import RequestState
from loraplex.twin.leaping import ANY_TOKEN, LeapingScheduler


class Landing(NamedTuple):
    """The result of a step. `updates`: of requests that got their first token from this engine, or that
    ended. `num_tokens`: tokens of all requests."""

    updates: list[TokenUpdate]
    num_tokens: int


class TwinScheduler(LeapingScheduler):
    def land(self, plan: StepPlan) -> Landing:
        """Do what `update` does, with a token that is no stop token."""
        self._memory.step_landed()
        self.adapters.step_landed()
        return self._give_tokens(self._sampled(plan))

    def _sampled(self, plan: StepPlan) -> Iterator[RequestState]:
        """Yield the requests that get a token from the oldest step in flight, after publishing their
        blocks."""
        publishes, find = self._pool.keeps_contents, self._sequences.get
        publish = self._queues.publish
        for chunk, (sequence, num_resets, samples) in zip(
            plan.chunks, self._under_way.popleft(), strict=True
        ):
            if find(sequence.request_id) is not sequence:
                continue
            if publishes and sequence.num_resets == num_resets:
                publish(sequence, chunk.end)
            if samples:
                yield sequence

    def _give_tokens(self, sampled: Iterable[RequestState]) -> Landing:
        """Give each request its token. Most are in the middle of their answers: their token is appended here,
        without an update."""
        limit = self._config.max_model_len
        updates: list[TokenUpdate] = []
        num_tokens = 0
        for sequence in sampled:
            num_tokens += 1
            sequence.num_unknown -= 1
            token_ids, max_tokens = sequence.token_ids, sequence.request.params.max_tokens
            length = len(token_ids) + 1
            num_output = length - sequence.num_prompt
            if num_output == 1 or length >= limit or (max_tokens is not None and num_output >= max_tokens):
                updates.append(self._accept(sequence, ANY_TOKEN))
            else:
                token_ids.append(ANY_TOKEN)
        return Landing(updates, num_tokens)
