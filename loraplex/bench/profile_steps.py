"""What `loraplex profile` measures of the engine: single steps of many kinds, through the engine itself.

A step is timed from the landing of the one before it to its own, which is what a stream of tokens sees. A
prompt on an idle engine is timed from being handed over, which is what its sender sees.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Final

from loraplex.bench.alternating import time_alternating
from loraplex.bench.engine_scenarios import bring_in, new_request, run_dry
from loraplex.bench.profile_host import Report
from loraplex.core.request import EngineRequest
from loraplex.engine.core import Engine
from loraplex.perf.step_cost import StepCost, StepFeatures, fit_step_cost

_SETTLE_STEPS: Final = 4
_TIMED_STEPS: Final = 8
_SLOWEST_PREFILL: Final = 512
"""Prompt tokens that a step reads at the least while others decode: the first must not end before the last
has begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAdapter:
    """An adapter that the engine knows."""

    version: str
    rank: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """Requests of `context` tokens that decode, and prompts that are read in the same step. Adapters go to
    the requests in turn, decoding ones first; with none, all are for the base model."""

    num_decodes: int = 0
    context: int = 0
    prompts: tuple[int, ...] = ()
    adapters: tuple[StepAdapter, ...] = ()

    @property
    def decode_tokens(self) -> int:
        """What each decoding request has to say for one measurement."""
        return _SETTLE_STEPS + _TIMED_STEPS + -(-self.num_decodes * self.context // _SLOWEST_PREFILL)

    @property
    def num_tokens(self) -> int:
        """In the KV cache at the end of a measurement."""
        return self.num_decodes * (self.context + self.decode_tokens) + sum(self.prompts)

    @property
    def max_context(self) -> int:
        return max(
            [self.context + self.decode_tokens] * (self.num_decodes > 0) + [n + 1 for n in self.prompts]
        )

    def adapter_of(self, index: int) -> StepAdapter | None:
        return self.adapters[index % len(self.adapters)] if self.adapters else None

    def features(self) -> StepFeatures:
        """Of the step in the middle of those that are timed."""
        tokens_of = [1] * self.num_decodes + list(self.prompts)
        used = [(n, adapter) for i, n in enumerate(tokens_of) if (adapter := self.adapter_of(i)) is not None]
        distinct = {adapter.version: adapter.num_bytes for _, adapter in used}
        return StepFeatures(
            num_decodes=self.num_decodes,
            num_prompts=len(self.prompts),
            num_prompt_tokens=sum(self.prompts),
            decode_positions=self.num_decodes * (self.context + self.decode_tokens / 2),
            prompt_pairs=sum(n * n / 2 for n in self.prompts),
            num_adapters=len(distinct),
            adapter_bytes=sum(distinct.values()),
            row_adapter_bytes=sum(n * adapter.num_bytes for n, adapter in used),
        )


def step_cases(
    adapters: Sequence[StepAdapter], *, on_gpu: bool, max_context: int, max_tokens: int
) -> list[StepCase]:
    """What to measure on an engine that holds `max_tokens` tokens: the base model by rows and by context,
    then what adapters add, then both kinds of rows in one step."""
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256) if on_gpu else (1, 2, 4, 8, 16, 32)
    prompts = (16, 32, 64, 128, 256, 512, 1024, 1536) if on_gpu else (16, 32, 64, 128, 256)
    ranks = sorted({adapter.rank for adapter in adapters})
    by_rank = {rank: tuple(each for each in adapters if each.rank == rank) for rank in ranks}
    several = rows[-4:-1]
    cases = [
        *(StepCase(num_decodes=n, context=16) for n in rows),
        *(
            StepCase(num_decodes=n, context=length)
            for n in (1, rows[3], several[0])
            for length in (256, 1024)
        ),
        *(StepCase(prompts=(n,)) for n in prompts),
        *(StepCase(prompts=(n // 4,) * 4) for n in prompts[2:]),
    ]
    for rank in ranks:
        mine = by_rank[rank]
        cases += [StepCase(num_decodes=n, context=16, adapters=mine[:1]) for n in several[:2]]
        cases += [StepCase(num_decodes=n, context=16, adapters=mine[:n]) for n in several]
        cases += [StepCase(prompts=(n,), adapters=mine[:1]) for n in (64, 256)]
        cases += [StepCase(prompts=(64,) * 4, adapters=mine[:4])]
    cases += [
        StepCase(num_decodes=n, context=16, prompts=(length,), adapters=used)
        for n, length in ((several[0], 64), (several[1], 256))
        for used in ((), by_rank[ranks[-1]][: n + 1])
    ]
    return [case for case in cases if case.max_context <= max_context and case.num_tokens <= max_tokens]


def measure_steps(
    engine: Engine, cases: Sequence[StepCase], *, vocab_size: int, repeats: int, report: Report
) -> StepCost:
    """Adapters must be registered; they are brought in before time counts."""
    versions = sorted({adapter.version for case in cases for adapter in case.adapters})
    bring_in(engine, versions, vocab_size)
    timer = _StepTimer(engine, vocab_size)
    took_s = time_alternating(
        [partial(timer.seconds, case) for case in cases], repeats=repeats, report=report
    )
    return fit_step_cost([(case.features(), each) for case, each in zip(cases, took_s, strict=True)])


class _StepTimer:
    """Runs cases on an engine that is idle before and after each."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._num_requests = 0

    def seconds(self, case: StepCase) -> float:
        if case.num_decodes == 0:
            return self._prompts_alone(case)
        return self._joined(case) if case.prompts else self._decodes_alone(case)

    def _prompts_alone(self, case: StepCase) -> float:
        steps_before = self._engine.stats().num_steps
        requests = [self._request(case, index, n, 1) for index, n in enumerate(case.prompts)]
        started = time.perf_counter()
        for request in requests:
            self._engine.add_request(request)
        run_dry(self._engine)
        took_s = time.perf_counter() - started
        assert self._engine.stats().num_steps == steps_before + 1, "prompts of a case fit one step"
        return took_s

    def _decodes_alone(self, case: StepCase) -> float:
        self._add_decodes(case)
        landings: list[float] = []
        while self._engine.has_work():
            if len(self._engine.step()) == case.num_decodes:
                landings.append(time.perf_counter())
        gaps = [later - sooner for sooner, later in pairwise(landings)]
        return median(gaps[_SETTLE_STEPS:] or gaps)

    def _joined(self, case: StepCase) -> float:
        """Prompts join requests that decode; the step that reads them is the one that yields their tokens."""
        engine, request_ids = self._engine, self._add_decodes(case)
        while len(engine.step()) < case.num_decodes:
            pass
        engine.step()
        prompts = [self._request(case, case.num_decodes + i, n, 1) for i, n in enumerate(case.prompts)]
        for request in prompts:
            engine.add_request(request)
        joined = {request.request_id for request in prompts}
        landed, took_s = time.perf_counter(), 0.0
        while not took_s:
            outputs = engine.step()
            now = time.perf_counter()
            if any(output.request_id in joined for output in outputs):
                took_s = now - landed
            landed = now
        for request_id in request_ids:
            engine.cancel(request_id)
        run_dry(engine)
        return took_s

    def _add_decodes(self, case: StepCase) -> list[str]:
        requests = [
            self._request(case, index, case.context, case.decode_tokens) for index in range(case.num_decodes)
        ]
        for request in requests:
            self._engine.add_request(request)
        return [request.request_id for request in requests]

    def _request(self, case: StepCase, index: int, num_tokens: int, output_tokens: int) -> EngineRequest:
        self._num_requests += 1
        adapter = case.adapter_of(index)
        return new_request(
            f"profile-{self._num_requests}",
            num_tokens,
            output_tokens,
            None if adapter is None else adapter.version,
            vocab_size=self._vocab_size,
            seed=self._num_requests,
        )
