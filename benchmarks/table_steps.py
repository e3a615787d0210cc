"""Measures the host's cost of a step by the context of its requests, with a model so small that a GPU waits.

This is the section `tables` of gpu_engine. The part of a step that depends on lists of blocks is reported
separately: building the batch, and filling the integers that a graph reads. Each context is measured twice,
in turns: with block tables kept from step to step, and with tables that are read again from the requests'
lists of blocks in every step. Requests share all but the end of their prompts, so that the prefix cache saves
computing them; their tables are as long as if they did not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from benchmarks.device_memory import release
from loraplex.bench.random_engine import BLOCK_SIZE, RandomEngineOptions, build_random_engine
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.batch import BatchBuilder
from loraplex.engine.core import Engine
from loraplex.model.shapes import config_of_shape

CONTEXTS: Final = (512, 2048, 8000)
ROUNDS: Final = 20
STEPS_A_ROUND: Final = 4
_MAX_POSITION: Final = 16384


def measure_tables(
    device: str, *, num_requests: int = 256, contexts: tuple[int, ...] = CONTEXTS, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    """Return the milliseconds of a step by context. Each context has its own engine, freed before the
    next."""
    found = []
    for context in contexts:
        found.append(_measure(device, num_requests, context, rounds))
        # The call that has returned held the only references to the engine.
        release()
    return found


def _measure(device: str, num_requests: int, context: int, rounds: int) -> dict[str, Any]:
    """Build an engine, measure it and close it. No reference to it or to its parts outlives the call."""
    config = config_of_shape("tiny")
    config = replace(config, shape=replace(config.shape, max_position=_MAX_POSITION))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    engine = build_random_engine(RandomEngineOptions(shape="tiny", device=device, dtype=dtype), config)
    try:
        engine.get_ready()  # steps replay graphs, as they do when serving
        return _measure_engine(engine, num_requests, context, rounds)
    finally:
        engine.close()


def _measure_engine(engine: Engine, num_requests: int, context: int, rounds: int) -> dict[str, Any]:
    params = SamplingParams(max_tokens=_MAX_POSITION - context, temperature=0.0, ignore_eos=True)
    prompt = [index * 7 % 256 for index in range(context - 1)]
    for number in range(num_requests):
        engine.add_request(
            EngineRequest(request_id=f"r{number}", prompt_token_ids=[*prompt, number % 256], params=params)
        )
        if number == 0:
            _run_until_all_decode(engine, 1)  # the others hit its blocks in the prefix cache
    _run_until_all_decode(engine, num_requests)
    watch = BuildWatch(engine)
    kept = _Times()
    anew = _Times()
    for _ in range(rounds):
        _time_steps(engine, watch, kept)
        _time_steps(engine, watch, anew, before_each=watch.builder.tables.forget_contents)
    return {
        "requests": num_requests,
        "context": context,
        "blocks_each": -(-context // BLOCK_SIZE),
        "build_ms": kept.median_build_ms,
        "step_ms": kept.median_step_ms,
        "tables_read_again_build_ms": anew.median_build_ms,
        "tables_read_again_step_ms": anew.median_step_ms,
    }


@dataclass(kw_only=True)
class _Times:
    """Milliseconds of steps, and of building their batches."""

    step_ms: list[float] = field(default_factory=list)
    build_ms: list[float] = field(default_factory=list)

    @property
    def median_step_ms(self) -> float:
        return round(statistics.median(self.step_ms), 3)

    @property
    def median_build_ms(self) -> float:
        return round(statistics.median(self.build_ms), 3)


class BuildWatch:
    """Sums the time in which an engine builds batches and fills the integers of graphs."""

    def __init__(self, engine: Engine) -> None:
        self.builder: BatchBuilder = engine._executor._builder  # type: ignore[attr-defined]
        self._spent_s = 0.0
        self._watch(self.builder, "build")
        runner = getattr(engine._executor, "_runner", None)  # only engines on a GPU have graphs
        if runner is not None:
            self._watch(runner, "_fill")

    def take_ms(self) -> float:
        """Return the milliseconds spent since the last call."""
        spent_s, self._spent_s = self._spent_s, 0.0
        return spent_s * 1e3

    def _watch(self, owner: object, name: str) -> None:
        method = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started_s = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._spent_s += time.perf_counter() - started_s

        setattr(owner, name, timed)


def _run_until_all_decode(engine: Engine, num_requests: int) -> None:
    num_decodes = 0
    while num_decodes < num_requests:
        engine.step()
        chunks = () if engine.landed is None else engine.landed.chunks
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)


def _time_steps(
    engine: Engine, watch: BuildWatch, times: _Times, before_each: Callable[[], None] = lambda: None
) -> None:
    for _ in range(STEPS_A_ROUND):
        watch.take_ms()
        started_s = time.perf_counter()
        before_each()
        engine.step()
        times.step_ms.append((time.perf_counter() - started_s) * 1e3)
        times.build_ms.append(watch.take_ms())
