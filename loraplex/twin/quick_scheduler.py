"""Decides the steps of a busy simulated engine without an object for every token.

With a hundred requests decoding in every step, nearly all of a simulation's time went to their chunks, which
are not used individually: a twin needs their number, their positions and their adapters. The decisions are
the scheduler's own; a test compares both.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, cast, overload

from loraplex.perf.step_cost import StepFeatures
from loraplex.scheduling.plan import Chunk, StepPlan
from loraplex.scheduling.request_state import ChunkUnderWay, RequestState
from loraplex.twin.twin_scheduler import Landing, TwinScheduler

_adapter = attrgetter("adapter")


class StepChunks(Sequence[Chunk]):
    """The chunks of a step. Chunks of prompts are stored; chunks of one token are created on access.
    `decoding`: their sequences. `starts`: their starts. `sampling`: all sequences that sample a token, in
    running order."""

    __slots__ = ("decoding", "prompts", "sampling", "starts")

    def __init__(self) -> None:
        self.prompts: list[Chunk] = []
        self.decoding: list[RequestState] = []
        self.starts: list[int] = []
        self.sampling: list[RequestState] = []

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prompts)

    def __iter__(self) -> Iterator[Chunk]:
        for sequence, start in zip(self.decoding, self.starts, strict=True):
            yield Chunk(sequence.request_id, sequence.adapter, start, [], sequence.block_ids, True)
        yield from self.prompts

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> list[Chunk]: ...
    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def withdraw(self, sequence: RequestState) -> None:
        """Remove the chunk of a request, if it has one, and count it as not computed."""
        if sequence in self.decoding:
            number = self.decoding.index(sequence)
            del self.decoding[number]
            sequence.num_computed = self.starts.pop(number)
        for chunk in self.prompts:
            if chunk.request_id == sequence.request_id:
                self.prompts.remove(chunk)
                sequence.num_computed = chunk.start
                break
        if sequence in self.sampling:
            self.sampling.remove(sequence)
            sequence.num_unknown -= 1

    @property
    def versions(self) -> set[str | None]:
        """The adapters of all chunks, with None for the base model."""
        return {*map(_adapter, self.decoding), *map(_adapter, self.prompts)}

    def features(self, adapter_bytes: Callable[[str], int]) -> StepFeatures:
        """Count all chunks as `step_features` does."""
        num_decodes, num_prompts, num_tokens, pairs = len(self.decoding), 0, 0, 0.0
        positions = sum(self.starts) + num_decodes
        rows: dict[str | None, int] = Counter(map(_adapter, self.decoding))
        for chunk in self.prompts:
            count, start, version = chunk.num_tokens, chunk.start, chunk.adapter
            if count == 1:
                num_decodes += 1
                positions += start + 1
            else:
                num_prompts += 1
                num_tokens += count
                pairs += count * (start + count / 2)
            rows[version] = rows.get(version, 0) + count
        rows.pop(None, None)
        sizes = [adapter_bytes(version) for version in rows if version is not None]
        return StepFeatures(
            num_decodes,
            num_prompts,
            num_tokens,
            positions,
            pairs,
            len(sizes),
            sum(sizes),
            sum([size * count for size, count in zip(sizes, rows.values(), strict=True)]),
            max(sizes, default=0),
            sum(rows.values()),
        )


class QuickScheduler(TwinScheduler):
    """The scheduler of engines that compute prompts beside decodes, with memory that has no prefix cache."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert not self._config.prompts_first
        assert not self._pool.keeps_contents
        self._sampling: deque[list[RequestState]] = deque()  # of the steps in flight

    def schedule(self) -> StepPlan:
        """Decide the same as `Scheduler.schedule`."""
        self._dissolve_group()
        preempted: list[RequestState] = []
        num_running = len(self._running)
        self._share_out()
        step, budget = self._step_of_running(self._choose_batch(), preempted)
        self._admission.bring_in()
        if not preempted:
            self._admit_to(step, budget, preempted)
            self._fail_without_room()
        self._is_stuck = bool(self._queues.paused) and not step and not preempted and not self._sampling
        all_decode = not preempted and len(self._running) == num_running == len(step)
        self._queues.is_settled = all_decode and budget == self._config.work.prefill_budget(num_running)
        return self._plan_of(step, preempted)

    def land(self, plan: StepPlan) -> Landing:
        self._memory.step_landed()
        self.adapters.step_landed()
        self._under_way.popleft()
        ids = self._sequences.ids
        return self._give_tokens(s for s in self._sampling.popleft() if s.request_id in ids)

    def check_integrity(self) -> None:
        kept = self._under_way
        self._under_way = deque(
            [ChunkUnderWay(sequence, sequence.num_resets, True) for sequence in step]
            for step in self._sampling
        )
        super().check_integrity()
        self._under_way = kept

    def _step_of_running(
        self, running: list[RequestState], preempted: list[RequestState]
    ) -> tuple[StepChunks, float]:
        """Do what `_schedule_running` does. Decodes are counted as computed at once: no decision in this step
        depends on them, and requests that are preempted come after those already processed."""
        work, limit, block_size = self._config.work, self._config.max_model_len, self._pool.block_size
        position_cost = work.position_cost
        budget = work.prefill_budget(
            sum(
                [
                    1 + position_cost * (s.num_computed + 0.5)  # as `work.cost` of one token
                    for s in running
                    if len(s.token_ids) + s.num_unknown - s.num_computed == 1
                ]
            )
        )
        step = StepChunks()
        decoding, starts, sampling = step.decoding, step.starts, step.sampling
        for sequence in running:
            start, num_unknown = sequence.num_computed, sequence.num_unknown
            length = len(sequence.token_ids) + num_unknown
            if preempted and sequence in preempted:
                continue
            if num_unknown and _has_all(sequence, length, limit):
                continue
            if length - start == 1:
                if length > len(sequence.block_ids) * block_size and not self._pressure.grow(
                    sequence, length, preempted
                ):
                    continue
                sequence.num_computed = length
                sequence.num_unknown = num_unknown + 1
                decoding.append(sequence)
                starts.append(start)
                sampling.append(sequence)
                continue
            num_tokens = work.chunk(length - start, start, budget)
            if num_tokens == 0:
                continue
            end = start + num_tokens
            if end > len(sequence.block_ids) * block_size and not self._pressure.grow(
                sequence, end, preempted
            ):
                continue
            self._count_on(step, sequence, sequence.next_chunk(num_tokens))
            budget -= work.cost(start, num_tokens)
        return step, budget

    def _admit_to(self, step: StepChunks, budget: float, preempted: list[RequestState]) -> None:
        """Admit waiting requests to the step."""
        # Whether a request may join while its adapter loads depends on all that the step computes.
        chunks = [*step] if self._table.serving.num_loading > 0 else []
        known = {chunk.request_id for chunk in chunks}
        self._admission.on_give_way = step.withdraw
        self._admission.admit(chunks, budget, preempted)
        new = [chunk for chunk in chunks if chunk.request_id not in known]
        admitted = self._running[len(self._running) - len(new) :]
        for sequence, chunk in zip(admitted, new, strict=True):
            self._count_on(step, sequence, chunk)

    def _count_on(self, step: StepChunks, sequence: RequestState, chunk: Chunk) -> None:
        """Add a part of a prompt to the step, and count it as computed."""
        step.prompts.append(chunk)
        sequence.num_computed = chunk.end
        if chunk.samples:
            sequence.num_unknown += 1
            step.sampling.append(sequence)

    def _plan_of(self, step: StepChunks, preempted: Sequence[RequestState]) -> StepPlan:
        if step:
            self._sampling.append(step.sampling)
        chunks = cast("tuple[Chunk, ...]", step)  # used like a tuple: read and never changed
        return self._decided(chunks, step.versions, [], preempted)


def _has_all(sequence: RequestState, length: int, max_model_len: int) -> bool:
    """Return whether the tokens in flight are the last ones, as `RequestState.needs_no_more` does."""
    max_tokens = sequence.request.params.max_tokens
    return length >= max_model_len or (max_tokens is not None and length >= sequence.num_prompt + max_tokens)
