"""Tracks the speed of a shared machine while a replay runs on it, and scales the twin's times by it."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import harmonic_mean
from typing import Final

from benchmarks.twin_loads import Setting, requests, see_sizes, specs_of, vocab_size_of
from loraplex.bench.engine_scenarios import new_request
from loraplex.bench.random_engine import RandomEngineOptions, build_random_engine, register
from loraplex.core.request import EngineRequest
from loraplex.perf.cost_model import CostModel
from loraplex.scheduling.plan import Chunk, StepPlan
from loraplex.scheduling.step_features import step_features
from loraplex.twin.decode_group import DecodeGroup
from loraplex.twin.times import CostModelTimes, Repeats

LOOK_EVERY_S: Final = 0.25
_SETTLE_STEPS: Final = 8
_LOOK_STEPS: Final = 12
_FIRST_LOOKS: Final = 25
"""Number of looks before a replay, by which the load is set."""
_NEIGHBOURS: Final = 3
"""Number of looks before and after a moment that determine its pace: all numbers of requests are among
them."""
_LOOKED_AT: Final = (2, 6, 12, 24, 48, 96)
"""Numbers of decoding requests, one for each look; the last is about the most that the KV cache holds."""


class Pace:
    """Ratios of measured to predicted time of steps on a separate engine, over the time of a replay, which
    starts with the first look. Requests come and go as in the workloads, with few at times and many at
    others. `at_first`: the pace before the replay."""

    def __init__(self, setting: Setting, profile: CostModel) -> None:
        self._profile = profile
        self._engine = build_random_engine(
            RandomEngineOptions(
                shape=setting.shape, device=setting.device, dtype=setting.dtype, compiled=True
            )
        )
        self._vocab_size = vocab_size_of(setting)
        specs = specs_of("pace", setting)
        self._bytes = {spec.version: spec.num_params * setting.dtype.itemsize for spec in specs}
        self._versions = register(self._engine, specs)
        see_sizes(self._engine, self._versions, self._vocab_size)
        self._upcoming = self._requests(setting)
        self._running: list[str] = []
        self._num_looks = 0
        for _ in _LOOKED_AT:  # warm up
            self._take_steps()
        self.at_first = harmonic_mean(self._take_steps() for _ in range(_FIRST_LOOKS))
        self._began_s: float | None = None
        self._seen_s = 0.0
        self._at_s: list[float] = []
        self._ratios: list[float] = []

    def close(self) -> None:
        self._engine.close()

    def figures(self) -> dict[str, list[float]]:
        """Return all looks."""
        return {"at_s": self._at_s, "times_the_profile": self._ratios}

    def at(self, moment_s: float) -> float:
        """Return the pace at a moment from the looks before and after it, as a mean of speeds: in a slow
        moment less work is done."""
        place = bisect_left(self._at_s, moment_s)
        return harmonic_mean(self._ratios[max(place - _NEIGHBOURS, 0) : place + _NEIGHBOURS + 1])

    def look(self) -> float:
        """Take a look unless the last one was just now; return the seconds that it took."""
        started_s = time.perf_counter()
        if started_s - self._seen_s < LOOK_EVERY_S:
            return 0.0
        if self._began_s is None:
            self._began_s = started_s
        self._at_s.append(started_s - self._began_s)
        self._ratios.append(self._take_steps())
        self._seen_s = time.perf_counter()
        self._began_s += self._seen_s - started_s
        return self._seen_s - started_s

    def _take_steps(self) -> float:
        """Run steps with another number of requests every time; return measured over predicted seconds."""
        level = _LOOKED_AT[self._num_looks % len(_LOOKED_AT)]
        self._num_looks += 1
        while len(self._running) > level:
            self._engine.cancel(self._running.pop())
        took_s = predicted_s = 0.0
        for number in range(_SETTLE_STEPS + _LOOK_STEPS):
            upcoming = [next(self._upcoming) for _ in range(level - len(self._running))]
            begun_s = time.perf_counter()
            for request in upcoming:
                self._engine.add_request(request)
                self._running.append(request.request_id)
            for output in self._engine.step():
                if output.finish_reason is not None:
                    self._running.remove(output.request_id)
            if number >= _SETTLE_STEPS:  # the first find none of their data in CPU caches
                took_s += time.perf_counter() - begun_s
                assert self._engine.landed is not None
                features = step_features(self._engine.landed.chunks, self._bytes.__getitem__)
                predicted_s += self._profile.step_s(features)
        return took_s / predicted_s

    def _requests(self, setting: Setting) -> Iterator[EngineRequest]:
        for number, request in enumerate(requests(replace(setting, duration_s=inf), 1.0, seed=97)):
            yield new_request(
                str(number),
                request.prompt_tokens,
                request.output_tokens,
                self._versions[request.adapter],
                vocab_size=self._vocab_size,
                seed=number,
            )


class PacedTimes(CostModelTimes):
    """The profile's times, on a machine that is `slower` at the moment."""

    slower = 1.0

    def step_s(self, plan: StepPlan, num_waiting: int) -> float:
        return super().step_s(plan, num_waiting) * self.slower

    def repeats(self, group: DecodeGroup, num_waiting: int) -> Repeats:
        found = super().repeats(group, num_waiting)
        return Repeats(found.first_s * self.slower, found.growth_s * self.slower)

    def beside_s(self, group: DecodeGroup, chunks: Sequence[Chunk]) -> float:
        return super().beside_s(group, chunks) * self.slower
