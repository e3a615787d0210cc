"""Measures steps while serving: requests of all lengths come and go, on any adapter, a few at first and many
later. Such successive steps take some per cent longer than the same steps measured by themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from statistics import median
from typing import Final

from loraplex.bench.alternating import quiet_collector
from loraplex.bench.engine_scenarios import new_request, run_dry
from loraplex.bench.profile_host import Report
from loraplex.bench.step_cases import SPREAD, CaseLimits, StepAdapter
from loraplex.core.request import EngineRequest
from loraplex.engine.core import Engine
from loraplex.perf.step_cost import StepCost, StepSample
from loraplex.scheduling.step_features import step_features

_MEDIAN_SHARE: Final = 16
"""Divisor of the longest context that gives the median length of prompts, and of outputs."""
_MEDIAN_TOKENS: Final = 128
"""Upper bound of that median, in tokens."""
_HELD: Final = 3
"""Approximate KV tokens that a request holds at its end, in multiples of that median."""
_BASE_SHARE: Final = 1 / 8
_PAUSE: Final = 2.0
"""Factor over the usual time of a step; a longer one was paused by the machine."""


def measure_serving(
    engine: Engine,
    adapters: Sequence[StepAdapter],
    others: Sequence[StepAdapter],
    limits: CaseLimits,
    *,
    vocab_size: int,
    steps_each: int,
    report: Report,
) -> tuple[list[StepSample], list[StepSample]]:
    """Measure `steps_each` steps with each number of running requests: on `adapters`, and then with other
    requests on `others`. All adapters must be in memory. Return both lists of samples."""
    length = min(_MEDIAN_TOKENS, limits.max_context // _MEDIAN_SHARE)
    levels = [level for level in limits.decodes if level * _HELD * length <= limits.max_tokens]
    assert levels, "memory for one request at the least"
    bytes_of = {adapter.version: adapter.num_bytes for adapter in (*adapters, *others)}.__getitem__

    def serve(seed: int, used: Sequence[StepAdapter]) -> list[StepSample]:
        upcoming = _requests(Random(seed), used, length, limits.max_context // 4, vocab_size)
        samples, running = list[StepSample](), set[str]()
        with quiet_collector():
            for level in levels:
                while len(running) < level:
                    running.add(_add(engine, next(upcoming)))
                _run(engine, steps_each, upcoming, running, bytes_of, samples)
        for request_id in running:
            engine.cancel(request_id)
        run_dry(engine)
        report((seed + 1) / 3)
        return samples

    serve(0, adapters)  # not counted: may compile for new sizes
    return serve(1, adapters), serve(2, others)


def without_pauses(samples: Sequence[StepSample], cost: StepCost) -> list[StepSample]:
    """Return the samples whose ratio of measured to predicted time is at most `_PAUSE` times the median."""
    ratios = [sample.seconds / cost.seconds(sample.step) for sample in samples]
    most = _PAUSE * median(ratios)
    return [sample for sample, ratio in zip(samples, ratios, strict=True) if ratio <= most]


def _run(
    engine: Engine,
    num_steps: int,
    upcoming: Iterator[EngineRequest],
    running: set[str],
    bytes_of: Callable[[str], int],
    samples: list[StepSample],
) -> None:
    """Run steps and append their samples; each request that ends is replaced by another. A step's time is
    that on its device, or without one, from the landing before it to its own."""
    landed, landed_s = engine.landed, None
    end = len(samples) + num_steps
    while len(samples) < end:
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.finish_reason is not None:
                running.remove(output.request_id)
                running.add(_add(engine, next(upcoming)))
        if engine.landed is landed or engine.landed is None:
            continue
        landed = engine.landed
        if landed_s is not None:
            seconds = engine.landed_step_s(now_s - landed_s)
            samples.append(StepSample(step_features(landed.chunks, bytes_of), seconds))
        landed_s = now_s


def _requests(
    random: Random, adapters: Sequence[StepAdapter], length: int, longest: int, vocab_size: int
) -> Iterator[EngineRequest]:
    def tokens() -> int:
        return min(max(round(length * random.lognormvariate(0.0, SPREAD)), 2), longest)

    for number in count():
        version = None if random.random() < _BASE_SHARE else random.choice(adapters).version
        yield new_request(
            f"serving-{number}", tokens(), tokens(), version, vocab_size=vocab_size, seed=number
        )


def _add(engine: Engine, request: EngineRequest) -> str:
    engine.add_request(request)
    return request.request_id
