"""Traces one cold start of each policy: a request on an adapter in host memory arrives while others decode.

Each policy runs three rounds, each on its own cold adapter: one that compiles and lets the profiler start up,
one without the profiler, to measure the cost of tracing, and the one whose trace is kept.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.trace_lanes import ARRIVAL, FIRST_TOKEN, OTHERS_TOKENS, STEP, read_trace, timeline_of
from loraplex.adapters.spec import AdapterSpec
from loraplex.bench.alternating import quiet_collector
from loraplex.bench.cold_scenarios import forget
from loraplex.bench.engine_scenarios import bring_in, new_request, run_dry
from loraplex.bench.random_engine import register
from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineOutput
from loraplex.engine.core import Engine

NUM_ROUNDS: Final = 3
"""Number of rounds, and of cold adapters that each policy needs."""
_STEPS_BEFORE: Final = 8
_STEPS_AFTER: Final = 4
_OUTPUT_TOKENS: Final = 480
"""More than there are steps in a round, so that no request ends within it."""
_COLD: Final = "cold"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """The number of decoding requests when the request arrives, and the length of all prompts."""

    num_decoding: int = 8
    prompt_tokens: int
    vocab_size: int


def record_policies(
    engine: Engine,
    policies: Sequence[ColdStart],
    resident: AdapterSpec,
    cold: Sequence[AdapterSpec],
    scene: Scene,
) -> dict[str, Any]:
    """Record a timeline of each policy. `cold`: one adapter for each round; `resident`: that of the decoding
    requests."""
    assert len(cold) == NUM_ROUNDS
    found = {}
    for policy in policies:
        engine.choose_cold_start(policy)
        versions = register(engine, [resident, *cold])
        bring_in(engine, versions[:1], scene.vocab_size)
        rounds = [
            Round(engine=engine, scene=scene, resident=versions[0], cold=version, seed=1000 * number)
            for number, version in enumerate(versions[1:])
        ]
        with quiet_collector():
            rounds[0].traced()
            untraced_s = rounds[1].run()
            timeline = rounds[2].traced()
        forget(engine, versions)
        found[str(policy)] = timeline | {"untraced_first_token_us": round(1e6 * untraced_s, 1)}
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One arrival. `resident` and `cold` are adapter versions."""

    engine: Engine
    scene: Scene
    resident: str
    cold: str
    seed: int

    def traced(self) -> dict[str, Any]:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities)
        self.run(profiler)
        with tempfile.TemporaryDirectory(prefix="loraplex-") as folder:
            trace = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(trace))
            return timeline_of(read_trace(trace), self._adapter(self.cold).num_bytes)

    def run(self, profiler: profile | None = None) -> float:
        """Return the seconds to the first token, by the host's clock."""
        names = [f"decoding-{number}" for number in range(self.scene.num_decoding)]
        for number, name in enumerate(names):
            self._add(name, self.resident, self.seed + number)
        while len(self._step()) < len(names):
            """Their prompts."""
        if profiler is not None:
            profiler.start()
        try:
            took_s = self._arrival()
        finally:
            if profiler is not None:
                profiler.stop()
        for name in (*names, _COLD):
            self.engine.cancel(name)
        run_dry(self.engine)
        return took_s

    def _arrival(self) -> float:
        for _ in range(_STEPS_BEFORE):
            self._step()
        arrived_s = time.perf_counter()
        with record_function(ARRIVAL):
            self._add(_COLD, self.cold, self.seed + self.scene.num_decoding)
        took_s: float | None = None
        while took_s is None or self._adapter(self.cold).tier != self._adapter(self.resident).tier:
            started = any(output.request_id == _COLD for output in self._step())
            if started and took_s is None:
                took_s = time.perf_counter() - arrived_s
                _mark(FIRST_TOKEN)
        for _ in range(_STEPS_AFTER):
            self._step()
        return took_s

    def _step(self) -> Sequence[EngineOutput]:
        with record_function(STEP):
            outputs = self.engine.step()
        errors = [output.error for output in outputs if output.error is not None]
        assert not errors, errors[0]
        assert all(output.finish_reason is None for output in outputs), "a request ended before the trace did"
        if any(output.request_id != _COLD for output in outputs):
            _mark(OTHERS_TOKENS)
        return outputs

    def _add(self, name: str, version: str, seed: int) -> None:
        scene = self.scene
        self.engine.add_request(
            new_request(
                name, scene.prompt_tokens, _OUTPUT_TOKENS, version, vocab_size=scene.vocab_size, seed=seed
            )
        )

    def _adapter(self, version: str) -> Any:
        return next(known for known in self.engine.stats().adapters if known.version == version)


def _mark(name: str) -> None:
    with record_function(name):
        """A moment."""
