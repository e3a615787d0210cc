"""What a step costs the host by the context of its requests, with a model so small that a GPU waits for it.

The section `tables` of gpu_engine. Each context is measured twice, in turns: with block tables kept from step
to step, and with tables that are read again from the requests' lists of blocks in every step. Requests share
all but the end of their prompts, so that the prefix cache spares computing them; their tables are as long as
if they did not.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
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
    """Milliseconds of a step, by context. Each context has an engine of its own, freed before the next."""
    found = []
    for context in contexts:
        found.append(_measure(device, num_requests, context, rounds))
        # Everything that referred to the engine was local to the call that has returned.
        release()
    return found


def _measure(device: str, num_requests: int, context: int, rounds: int) -> dict[str, Any]:
    """Build an engine, measure it and close it. No reference to it or to its parts outlives the call."""
    config = config_of_shape("tiny")
    config = replace(config, shape=replace(config.shape, max_position=_MAX_POSITION))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    engine = build_random_engine(RandomEngineOptions(shape="tiny", device=device, dtype=dtype), config)
    try:
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
            _run_until_all_decode(engine, 1)  # the others find its blocks
    _run_until_all_decode(engine, num_requests)
    tables = _builder_of(engine).tables
    kept_ms: list[float] = []
    anew_ms: list[float] = []
    for _ in range(rounds):
        kept_ms.append(_step_ms(engine))
        anew_ms.append(_step_ms(engine, before_each=tables.forget_contents))
    return {
        "requests": num_requests,
        "context": context,
        "blocks_each": -(-context // BLOCK_SIZE),
        "step_ms": round(statistics.median(kept_ms), 3),
        "tables_read_again_step_ms": round(statistics.median(anew_ms), 3),
    }


def _run_until_all_decode(engine: Engine, num_requests: int) -> None:
    num_decodes = 0
    while num_decodes < num_requests:
        engine.step()
        chunks = () if engine.landed is None else engine.landed.chunks
        num_decodes = sum(chunk.num_tokens == 1 for chunk in chunks)


def _builder_of(engine: Engine) -> BatchBuilder:
    builder: BatchBuilder = engine._executor._builder  # type: ignore[attr-defined]
    return builder


def _step_ms(engine: Engine, before_each: Any = lambda: None) -> float:
    took_ms = []
    for _ in range(STEPS_A_ROUND):
        started_s = time.perf_counter()
        before_each()
        engine.step()
        took_ms.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(took_ms)
