"""Measurements of `loraplex profile` with the engine: single steps of many kinds.

A step is timed from the landing of the one before it to its own, which is the gap in a stream of tokens; one
with prompts, which may be launched kernel by kernel, by the device's clock if there is one. A prompt on an
idle engine is timed from when its request is added, which is the time to its first token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice, pairwise
from random import Random
from typing import Final, NamedTuple

from loraplex.bench.alternating import time_alternating, time_within, undisturbed
from loraplex.bench.engine_scenarios import bring_in, new_request, run_dry
from loraplex.bench.profile_host import Report
from loraplex.bench.profile_serving import without_pauses
from loraplex.bench.step_cases import JOINED_SHOTS, SETTLE_STEPS, TIMED_STEPS, StepCase
from loraplex.core.request import EngineOutput, EngineRequest
from loraplex.engine.core import Engine
from loraplex.perf.least_squares import FitQuality, quality_of
from loraplex.perf.step_cost import StepCost, StepFeatures, StepSample, fit_step_cost
from loraplex.scheduling.plan import StepPlan
from loraplex.scheduling.step_features import step_features

_MAX_SHOTS: Final = 4
_SHOTS_S: Final = 0.03
"""Seconds after which one measurement of prompts ends, if not after `_MAX_SHOTS` of them: short ones are
repeated, because a pause of the machine distorts them more."""
_NUM_SERVED: Final = 300
"""Most steps of serving to fit: about three for each that was measured by itself."""
_LEAST_CASES: Final = 24
"""Cases that are measured however long it takes: about the fewest that tell all costs apart."""
_FEW_STEPS: Final = (2, 6)
"""Steps before those that are timed, and timed ones, where these take most of the time."""
_IDLE_S: Final = 0.02
"""Seconds of pause before a prompt on an idle engine: right after another step, caches would be warmer."""


class StepCases(NamedTuple):
    """Cases to measure. `fitted`: those that the model is fitted to; it predicts the others."""

    fitted: Sequence[StepCase]
    decodes: Sequence[StepCase]
    prompts: Sequence[StepCase]


class StepSamples(NamedTuple):
    """Measurements of `StepCases`, in the same order."""

    fitted: Sequence[StepSample]
    decodes: Sequence[StepSample]
    prompts: Sequence[StepSample]


class MeasuredSteps(NamedTuple):
    """The fitted cost. `decodes`, `prompts`, `serving`: its errors on samples that were not fitted."""

    cost: StepCost
    decodes: FitQuality
    prompts: FitQuality
    serving: FitQuality | None


def measure_steps(
    engine: Engine,
    cases: StepCases,
    *,
    vocab_size: int,
    repeats: int,
    report: Report,
    has_few_steps: bool = False,
    budget_s: float | None = None,
) -> StepSamples:
    """Measure the cases. Their adapters must be registered; they are loaded before the first measurement.
    `has_few_steps`: those that decode do so for fewer steps. `budget_s`: seconds after which those that were
    not reached are left out."""
    every = [case for each in cases for case in each]
    bytes_of = {adapter.version: adapter.num_bytes for case in every for adapter in case.adapters}
    bring_in(engine, sorted(bytes_of), vocab_size)
    timer = _StepTimer(engine, vocab_size, bytes_of, *(_FEW_STEPS if has_few_steps else ()))
    preempted_before = engine.stats().num_preemptions
    timed = [partial(timer.seconds, case) for case in every]
    if budget_s is None:
        took_s = dict(enumerate(time_alternating(timed, repeats=repeats, report=report)))
    else:
        took_s = time_within(
            timed, budget_s=budget_s, least=_LEAST_CASES, most_repeats=repeats, report=report
        )
    assert engine.stats().num_preemptions == preempted_before, "cases fit the engine's memory"
    numbers = iter(range(len(every)))
    return StepSamples(
        *(
            [
                StepSample(timer.steps[every[number]], took_s[number])
                for number in islice(numbers, len(each))
                if number in took_s
            ]
            for each in cases
        )
    )


def fit_steps(
    samples: StepSamples, served: Sequence[StepSample], others: Sequence[StepSample], *, stepped: bool
) -> MeasuredSteps:
    """Fit the cost of steps. `served`: steps of serving to fit as well, if any; `others`: steps of serving to
    predict, if any. `stepped`: steps are padded to the sizes of the fit."""
    by_themselves = fit_step_cost(samples.fitted, stepped=stepped)
    served = without_pauses(served, by_themselves) if served else ()
    drawn = Random(0).sample(served, min(_NUM_SERVED, len(served)))
    cost = fit_step_cost(samples.fitted, drawn, stepped=stepped)

    def quality(held_out: Sequence[StepSample]) -> FitQuality:
        return quality_of([cost.seconds(step) for step, _ in held_out], [each for _, each in held_out])

    return MeasuredSteps(
        cost,
        decodes=quality(samples.decodes),
        prompts=quality(samples.prompts),
        serving=quality(others) if others else None,
    )


class _StepTimer:
    """Runs cases on an engine that is idle before and after each. `steps`: features of each case's timed
    step, or of the middle one of several, taken from the plan: the scheduler decides how far requests are by
    then."""

    def __init__(
        self,
        engine: Engine,
        vocab_size: int,
        bytes_of: Mapping[str, int],
        settle_steps: int = SETTLE_STEPS,
        timed_steps: int = TIMED_STEPS,
    ) -> None:
        self.steps: dict[StepCase, StepFeatures] = {}
        self._settle_steps, self._timed_steps = settle_steps, timed_steps
        self._bytes_of = bytes_of
        self._engine = engine
        self._vocab_size = vocab_size
        self._num_requests = 0

    def seconds(self, case: StepCase) -> float:
        if case.num_decodes == 0:
            return self._prompts_alone(case)
        return self._joined(case) if case.prompts else self._decodes_alone(case)

    def _prompts_alone(self, case: StepCase) -> float:
        shots_s: list[float] = []
        while len(shots_s) < _MAX_SHOTS and sum(shots_s) < _SHOTS_S:
            steps_before = self._engine.stats().num_steps
            requests = [self._request(case, index, n, 1) for index, n in enumerate(case.prompts)]
            time.sleep(_IDLE_S)
            started = time.perf_counter()
            for request in requests:
                self._engine.add_request(request)
            run_dry(self._engine)
            shots_s.append(time.perf_counter() - started)
            assert self._engine.stats().num_steps == steps_before + 1, "prompts of a case fit one step"
        self._note(case, self._engine.landed)
        return undisturbed(shots_s)

    def _decodes_alone(self, case: StepCase) -> float:
        engine, request_ids = self._engine, self._add_decodes(case)
        landings: list[tuple[float, StepPlan | None]] = []
        while len(landings) < self._settle_steps + self._timed_steps:
            if len(self._step()) == case.num_decodes:
                landings.append((time.perf_counter(), engine.landed))
        self._cancel(request_ids)
        timed = landings[self._settle_steps :]
        self._note(case, timed[len(timed) // 2][1])
        return undisturbed([later - sooner for (sooner, _), (later, _) in pairwise(timed)])

    def _joined(self, case: StepCase) -> float:
        """Time steps in which prompts join requests that decode; such a step is the one that returns the
        prompts' first tokens."""
        engine, request_ids = self._engine, self._add_decodes(case)
        while len(self._step()) < case.num_decodes:
            pass
        for _ in range(self._settle_steps):
            self._step()
        shots_s: list[float] = []
        while len(shots_s) < JOINED_SHOTS:
            self._step()
            shots_s.append(self._join(case))
            if len(shots_s) == 1 + JOINED_SHOTS // 2:
                self._note(case, engine.landed)
        self._cancel(request_ids)
        return undisturbed(shots_s)

    def _join(self, case: StepCase) -> float:
        prompts = [self._request(case, case.num_decodes + i, n, 1) for i, n in enumerate(case.prompts)]
        joined = {request.request_id for request in prompts}
        landed = time.perf_counter()
        for request in prompts:
            self._engine.add_request(request)
        while True:
            outputs = self._step()
            now = time.perf_counter()
            if any(output.request_id in joined for output in outputs):
                return self._engine.landed_step_s(now - landed)
            landed = now

    def _step(self) -> Sequence[EngineOutput]:
        assert self._engine.has_work(), "requests of a case have tokens enough to say"
        return self._engine.step()

    def _note(self, case: StepCase, plan: StepPlan | None) -> None:
        assert plan is not None, "a step has landed"
        self.steps[case] = step_features(plan.chunks, self._bytes_of.__getitem__)

    def _cancel(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._engine.cancel(request_id)
        run_dry(self._engine)

    def _add_decodes(self, case: StepCase) -> list[str]:
        requests = [
            self._request(case, index, context, case.decode_tokens)
            for index, context in enumerate(case.contexts)
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
