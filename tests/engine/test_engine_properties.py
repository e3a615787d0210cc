"""Whatever comes in whatever order: every request gets the text it would have had alone.

Random arrivals, lengths, adapters, cancels and memory sizes; the books are checked after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from cheap_merges import cheap_merges
from driving import Finished, run_to_end, step
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.batching import Batching
from loraplex.core.cold_start import ColdStart
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config

TOKEN_BYTES = 2 * 2 * 32 * 4  # K and V, two layers, two heads of sixteen, float32
RANKS = (1, 3, 8, 16)


@dataclass(frozen=True)
class Arrival:
    """A request and the step it arrives at; `cancel_after` steps later it is cancelled, if not None.

    `reloads`: its adapter is taken out and put back right after it arrives, as a reload does. `stops`: some
    tokens end it, so that a step decided before that was known has computed too much. `scored`: its prompt
    is scored, over as many steps as that takes.
    """

    at_step: int
    prompt_seed: int
    num_prompt: int
    num_output: int
    adapter: int | None
    sampled: bool
    cancel_after: int | None
    reloads: bool
    stops: bool
    scored: bool


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 25),
    prompt_seed=st.integers(0, 3),  # few, so that prefixes repeat
    num_prompt=st.integers(1, 60),
    num_output=st.integers(1, 25),
    adapter=st.sampled_from([None, 0, 1, 2, 3]),
    sampled=st.booleans(),
    cancel_after=st.none() | st.none() | st.integers(0, 15),
    reloads=st.booleans(),
    stops=st.booleans(),
    scored=st.booleans(),
)


@lru_cache(maxsize=1)
def checkpoint() -> tuple[Path, tuple[AdapterSpec, ...]]:
    root = Path(mkdtemp(prefix="loraplex-properties-"))
    model = save_model(root / "base", num_hidden_layers=2, eos_token_id=None)
    shape = load_config(root / "base").shape
    specs = []
    for rank in RANKS:
        save_adapter(root / f"r{rank}", model, rank=rank, seed=rank)
        specs.append(read_adapter(root / f"r{rank}", shape))
    return root / "base", tuple(specs)


def build(**options: Any) -> Engine:
    folder, specs = checkpoint()
    engine = build_core(EngineOptions(model=str(folder), block_size=4, **options))
    for spec in specs:
        engine.add_adapter(spec)
    return engine


@lru_cache(maxsize=1)
def roomy_engine() -> Engine:
    return build(kv_memory_bytes=2000 * TOKEN_BYTES)


def request_of(request_id: str, arrival: Arrival) -> EngineRequest:
    adapter = None if arrival.adapter is None else checkpoint()[1][arrival.adapter].version
    seed = arrival.prompt_seed
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[(seed + index * (3 + seed)) % 256 for index in range(arrival.num_prompt)],
        params=SamplingParams(
            max_tokens=arrival.num_output,
            temperature=1.0 if arrival.sampled else 0.0,
            seed=5,
            stop_token_ids=tuple(range(0, 256, 11)) if arrival.stops else (),
            prompt_logprobs=0 if arrival.scored else None,
        ),
        adapter=adapter,
    )


@lru_cache(maxsize=4096)
def alone(arrival: Arrival) -> Finished:
    engine = roomy_engine()
    engine.add_request(request_of("alone", arrival))
    return run_to_end(engine)["alone"]


def scores(found: Finished) -> list[float] | None:
    """Return the log-probabilities of the prompt's tokens after the first."""
    if found.prompt_logprobs is None:
        return None
    assert found.prompt_logprobs[0] is None
    return [logprob.logprob for logprob in found.prompt_logprobs[1:] if logprob is not None]


@settings(max_examples=examples(10, 40))
@given(
    requests=st.lists(arrivals, min_size=1, max_size=10),
    num_blocks=st.integers(22, 60),
    max_step_tokens=st.integers(3, 80),
    max_running=st.integers(1, 8),
    host_adapters=st.integers(1, 4),
    runs_ahead=st.booleans(),
)
def test_every_request_gets_the_text_it_would_have_had_alone(
    requests: list[Arrival],
    num_blocks: int,
    max_step_tokens: int,
    max_running: int,
    host_adapters: int,
    runs_ahead: bool,
) -> None:
    largest = max(adapter.num_bytes for adapter in roomy_engine().stats().adapters)
    engine = build(
        kv_memory_bytes=num_blocks * 4 * TOKEN_BYTES,
        host_adapter_memory_bytes=largest * host_adapters,
        max_step_tokens=max_step_tokens,
        max_running=max_running,
        runs_ahead=runs_ahead,
    )
    check(drive(engine, requests), requests)
    assert engine.stats().num_kv_blocks_used == 0
    assert all(adapter.in_flight == 0 for adapter in engine.stats().adapters)
    engine.close()


@settings(max_examples=examples(6, 15))
@given(
    batching=st.sampled_from([each for each in Batching if each is not Batching.FCFS]),
    requests=st.lists(arrivals, min_size=4, max_size=14),
    skew=st.integers(0, 4),
    num_blocks=st.integers(22, 60),
    max_running=st.integers(1, 6),
    runs_ahead=st.booleans(),
)
def test_under_every_batching_policy_it_is_the_same_text(
    batching: Batching,
    requests: list[Arrival],
    skew: int,
    num_blocks: int,
    max_running: int,
    runs_ahead: bool,
) -> None:
    """Merged, paused, grouped. `skew`: of five requests, those that go to the first adapter."""
    requests = [
        replace(each, adapter=0) if number % 5 < skew else each for number, each in enumerate(requests)
    ]
    with cheap_merges():
        engine = build(
            kv_memory_bytes=num_blocks * 4 * TOKEN_BYTES,
            max_step_tokens=40,
            max_running=max_running,
            runs_ahead=runs_ahead,
            batching=batching,
        )
        check(drive(engine, requests), requests)
    assert engine.stats().num_kv_blocks_used == 0
    engine.close()


@pytest.mark.parametrize("batching", [each for each in Batching if each.merges])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_requests_that_pause_get_the_same_text(batching: Batching, runs_ahead: bool) -> None:
    """Steps wait for adapters, so that which requests run does not depend on how busy the machine is. After
    the first request the oldest one is for another adapter than most."""
    requests = [
        Arrival(
            at_step=5 * (number // 4),
            prompt_seed=number % 4,
            num_prompt=8 + number,
            num_output=4 if number == 0 else 24,
            adapter=1 if number == 1 else 0,
            sampled=number % 3 == 0,
            cancel_after=None,
            reloads=False,
            stops=False,
            scored=False,
        )
        for number in range(8)
    ]
    with cheap_merges():
        engine = build(
            kv_memory_bytes=400 * TOKEN_BYTES,
            max_running=6,
            runs_ahead=runs_ahead,
            batching=batching,
            cold_start=ColdStart.ON_DEMAND,
        )
        check(drive(engine, requests), requests)
    stats = engine.stats()
    assert stats.num_merged_steps > 0
    assert stats.num_pauses > 0
    engine.close()


def check(done: dict[str, Finished], requests: list[Arrival]) -> None:
    """Assert that each request got what it would have got alone, or a part of it if it was cancelled."""
    for index, arrival in enumerate(requests):
        found = done.get(str(index), Finished())
        expected = alone(arrival)
        if found.finish_reason is None:
            assert arrival.cancel_after is not None, "a request was lost"
            assert found.token_ids == expected.token_ids[: len(found.token_ids)]
        else:
            assert found.token_ids == expected.token_ids
            assert scores(found) == (scores(expected) and pytest.approx(scores(expected), abs=1e-4))


def drive(engine: Engine, requests: list[Arrival]) -> dict[str, Finished]:
    done: dict[str, Finished] = {}
    last = max(arrival.at_step + (arrival.cancel_after or 0) for arrival in requests)
    for now in range(20_000):
        for index, arrival in enumerate(requests):
            if arrival.at_step == now:
                engine.add_request(request_of(str(index), arrival))
                if arrival.reloads and arrival.adapter is not None:
                    spec = checkpoint()[1][arrival.adapter]
                    engine.remove_adapter(spec.version)
                    engine.add_adapter(spec)
            if arrival.cancel_after is not None and arrival.at_step + arrival.cancel_after == now:
                engine.cancel(str(index))
        if engine.has_work():
            step(engine, done)
        elif now > last:
            return done
    raise AssertionError("the engine does not come to an end")
