"""The scenarios of `loraplex bench engine`, in-process: no HTTP, no tokenizer, random prompts of token ids.

decode   the time between tokens of a full batch, every request decoding
prefill  the time from a batch of prompts to all their first tokens
serve    a workload file, replayed in real time
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from loraplex.bench.alternating import quiet_collector
from loraplex.bench.distribution import Distribution
from loraplex.bench.records import RequestRecord
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.core import Engine
from loraplex.workload.jsonl import WorkloadRequest

_SETTLE_STEPS = 8
"""Steps after the prompts before timing starts: the last prompts still share a step with decoding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A batch of equal requests; request i is on `adapters[i % len(adapters)]`, or on the base model.

    `seed` is that of the prompts. Loads with equal seeds hit each other's blocks in the prefix cache.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    adapters: tuple[str, ...]
    vocab_size: int
    seed: int = 0


def measure_decode(engine: Engine, load: Load, repeats: int) -> Distribution:
    """Return the milliseconds between tokens while all requests of the batch decode."""
    bring_in(engine, load.adapters, load.vocab_size)
    engine.warm_up()
    gaps_ms: list[float] = []
    with quiet_collector():
        for repeat in range(repeats + 1):  # the first does not count
            found = _decode_gaps(engine, load, seed=repeat)
            gaps_ms += found if repeat > 0 else []
    distribution = Distribution.of(gaps_ms)
    assert distribution is not None, "too few output tokens to measure a gap"
    return distribution


def measure_prefill(engine: Engine, load: Load, repeats: int) -> Distribution:
    """Return the milliseconds from adding the batch to the last of its first tokens."""
    bring_in(engine, load.adapters, load.vocab_size)
    engine.warm_up()
    times_ms: list[float] = []
    with quiet_collector():
        for repeat in range(repeats + 1):
            requests = _requests(load, output_tokens=1, seed=repeat)
            started = time.perf_counter()
            for request in requests:
                engine.add_request(request)
            run_dry(engine)
            times_ms += [(time.perf_counter() - started) * 1e3] if repeat > 0 else []
    distribution = Distribution.of(times_ms)
    assert distribution is not None
    return distribution


def replay(
    engine: Engine,
    requests: Sequence[WorkloadRequest],
    versions: Sequence[str],
    vocab_size: int,
    after_step: Callable[[], float] = lambda: 0.0,
) -> list[RequestRecord]:
    """Add every request at its arrival time; return records in the order of the workload.

    `after_step` returns how many seconds to exclude from the measurement.
    """
    waiting = deque(enumerate(requests))
    prompts = [_prompt(request.prompt_tokens, vocab_size, seed=i) for i, request in enumerate(requests)]
    times: list[list[float]] = [[] for _ in requests]
    errors: dict[int, str] = {}
    with quiet_collector():
        started = time.perf_counter()
        while waiting or engine.has_work():
            now = time.perf_counter() - started
            while waiting and waiting[0][1].arrival_s <= now:
                index, request = waiting.popleft()
                version = versions[request.adapter % len(versions)] if versions else None
                engine.add_request(_request(str(index), prompts[index], request.output_tokens, version))
            if not engine.has_work():
                time.sleep(max(0.0, waiting[0][1].arrival_s - now))
                continue
            outputs = engine.step()
            now = time.perf_counter() - started
            for output in outputs:
                times[int(output.request_id)] += [now] * len(output.token_ids)
                if output.error is not None:
                    errors[int(output.request_id)] = output.error
            started += after_step()
    return [
        RequestRecord(
            model="base" if not versions else versions[request.adapter % len(versions)],
            prompt_tokens=request.prompt_tokens,
            output_tokens=len(times[index]),
            arrival_s=request.arrival_s,
            token_times_s=tuple(times[index]),
            finish_s=times[index][-1] if times[index] else request.arrival_s,
            error=errors.get(index),
        )
        for index, request in enumerate(requests)
    ]


def bring_in(engine: Engine, versions: Sequence[str], vocab_size: int) -> None:
    """Load adapters by sending a short request to each."""
    for version in dict.fromkeys(versions):
        prompt = _prompt(2, vocab_size, seed=1)
        engine.add_request(_request(f"bring-in-{version}", prompt, 1, version))
    run_dry(engine)


def _decode_gaps(engine: Engine, load: Load, seed: int) -> list[float]:
    for request in _requests(load, load.output_tokens, seed):
        engine.add_request(request)
    full: list[float] = []
    while engine.has_work():
        outputs = engine.step()
        if len(outputs) == load.batch:
            full.append(time.perf_counter())
    return [(later - sooner) * 1e3 for sooner, later in pairwise(full)][_SETTLE_STEPS:]


def _requests(load: Load, output_tokens: int, seed: int) -> list[EngineRequest]:
    found = []
    for index in range(load.batch):
        version = load.adapters[index % len(load.adapters)] if load.adapters else None
        prompt = _prompt(load.prompt_tokens, load.vocab_size, f"{load.seed} {seed} {index}")
        found.append(_request(f"{seed}-{index}", prompt, output_tokens, version))
    return found


def first_token_ms(
    engine: Engine, version: str | None, prompt_tokens: int, vocab_size: int, seed: int
) -> float:
    """Return the TTFT of one request in milliseconds, on a warmed-up engine. The engine is idle
    afterwards."""
    engine.warm_up()
    prompt = _prompt(prompt_tokens, vocab_size, seed)
    started = time.perf_counter()
    engine.add_request(_request("one", prompt, 1, version))
    while not engine.step():
        pass
    first_s = time.perf_counter() - started
    run_dry(engine)
    return first_s * 1e3


def run_dry(engine: Engine) -> None:
    """Step until the engine has no work left."""
    while engine.has_work():
        engine.step()


def new_request(
    request_id: str,
    prompt_tokens: int,
    output_tokens: int,
    version: str | None,
    *,
    vocab_size: int,
    seed: int,
) -> EngineRequest:
    """Return a request with a random prompt that depends on the seed."""
    return _request(request_id, _prompt(prompt_tokens, vocab_size, seed), output_tokens, version)


def _request(request_id: str, prompt: list[int], output_tokens: int, version: str | None) -> EngineRequest:
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=params, adapter=version)


def _prompt(num_tokens: int, vocab_size: int, seed: int | str) -> list[int]:
    """Return random tokens, so that no prompt finds another's prefix in the cache."""
    generator = random.Random(seed)
    return [generator.randrange(vocab_size) for _ in range(num_tokens)]
