"""A request that comes with tokens of its answer gets the rest of the answer that it would have had."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from driving import Finished, run_to_end
from tiny import save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.continuation import continued
from loraplex.core.errors import CapacityError, ContextLengthError, InvalidRequestError
from loraplex.core.request import EngineRequest, TokenLogprob
from loraplex.core.sampling import SamplingParams
from loraplex.engine.build import build_core
from loraplex.engine.core import Engine
from loraplex.engine.options import EngineOptions
from loraplex.model.config import load_config

PROMPT = [(11 * index + 5) % 256 for index in range(21)]
CONTEXT = 128
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 3},
    "negative seed": {"seed": -4, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"seed": 5, "frequency_penalty": 0.7, "presence_penalty": -0.5},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "min_tokens": {"temperature": 0.0, "min_tokens": 9, "stop_token_ids": tuple(range(128))},
    "stop": {"seed": 8, "stop_token_ids": tuple(range(0, 256, 9)), "max_tokens": 40},
    "bias": {"seed": 6, "logit_bias": ((7, 5.0), (9, 4.0)), "frequency_penalty": 2.0},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, AdapterSpec]:
    root = tmp_path_factory.mktemp("continuation")
    model = save_model(root / "base")
    save_adapter(root / "adapter", model, rank=4)
    return root / "base", read_adapter(root / "adapter", load_config(root / "base").shape)


def built(saved: tuple[Path, AdapterSpec], **options: Any) -> Engine:
    folder, spec = saved
    engine = build_core(
        EngineOptions(
            model=str(folder),
            **{"kv_memory_bytes": 1 << 20, "block_size": 4, "max_model_len": CONTEXT} | options,
        )
    )
    engine.add_adapter(spec)
    return engine


@pytest.fixture(scope="module")
def engine(saved: tuple[Path, AdapterSpec]) -> Iterator[Engine]:
    core = built(saved)
    yield core
    assert core.stats().num_kv_blocks_used == 0, "blocks leaked"
    core.close()


def request_of(adapter: str | None = None, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id="request",
        prompt_token_ids=PROMPT,
        params=SamplingParams(**{"max_tokens": 14, "logprobs": 2, **params}),
        adapter=adapter,
        eos_token_ids=(2,),
    )


def run(engine: Engine, request: EngineRequest) -> Finished:
    engine.add_request(request)
    return run_to_end(engine)[request.request_id]


def numbers(entries: list[TokenLogprob]) -> list[float]:
    return [value for entry in entries for value in (entry.logprob, *(value for _, value in entry.top))]


def check_every_cut(engine: Engine, request: EngineRequest, *, at_once: bool = False) -> None:
    """Have what is left after each cut answered: one after the other, or all `at_once`."""
    whole = run(engine, request)
    assert whole.error is None
    assert len(whole.token_ids) > 1
    # The prefix cache is not asked for a prompt that is to be scored: everything is computed again.
    scored = replace(request, params=replace(request.params, prompt_logprobs=0))
    cuts = range(1, len(whole.token_ids))
    made = {cut: tuple(whole.token_ids[:cut]) for cut in cuts}
    computed = [continued(scored, made[cut], has_prompt_logprobs=False) for cut in cuts]
    cached = [continued(request, made[cut]) for cut in cuts]
    for cut, again in zip(cuts, run_all(engine, computed, at_once=at_once), strict=True):
        assert again.token_ids == whole.token_ids[cut:], f"cut after {cut}, computed again"
    for cut, rest in zip(cuts, run_all(engine, cached, at_once=at_once), strict=True):
        assert rest.token_ids == whole.token_ids[cut:], f"cut after {cut}"
        assert (rest.finish_reason, rest.stop_token_id) == (whole.finish_reason, whole.stop_token_id)
        assert [entry.token_id for entry in rest.logprobs] == whole.token_ids[cut : len(whole.logprobs)]
        assert numbers(rest.logprobs) == pytest.approx(numbers(whole.logprobs[cut:]), abs=1e-4)
        assert rest.num_cached_tokens <= len(PROMPT)


def run_all(engine: Engine, requests: Sequence[EngineRequest], *, at_once: bool) -> list[Finished]:
    if not at_once:
        return [run(engine, request) for request in requests]
    for number, request in enumerate(requests):
        engine.add_request(replace(request, request_id=str(number)))
    done = run_to_end(engine)
    return [done[str(number)] for number in range(len(requests))]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("on_adapter", [False, True], ids=["base", "adapter"])
def test_the_rest_is_the_same_wherever_it_was_cut(
    engine: Engine, saved: tuple[Path, AdapterSpec], way: str, on_adapter: bool
) -> None:
    request = request_of(saved[1].version if on_adapter else None, **WAYS[way])
    check_every_cut(engine, request, at_once=True)


@pytest.mark.parametrize("options", [{"max_step_tokens": 3}, {"runs_ahead": True}], ids=["chunks", "ahead"])
@pytest.mark.parametrize(
    "ways",
    [("frequency", "stop"), pytest.param(("greedy", "min_tokens"), marks=pytest.mark.slow)],
    ids="-".join,
)
def test_the_rest_is_the_same_in_small_steps_and_ahead(
    saved: tuple[Path, AdapterSpec], options: dict[str, Any], ways: Sequence[str]
) -> None:
    core = built(saved, **options)
    for way in ways:
        check_every_cut(core, request_of(**WAYS[way]))
    core.close()


def test_many_go_on_side_by_side_where_memory_is_short(
    saved: tuple[Path, AdapterSpec], engine: Engine
) -> None:
    token_bytes = 2 * 3 * 32 * 4  # K and V, three layers, two heads of sixteen, float32
    tight = built(saved, kv_memory_bytes=20 * 4 * token_bytes, max_model_len=64)
    expected: dict[str, list[int]] = {}
    for number, way in enumerate(WAYS):
        request = replace(request_of(**WAYS[way]), request_id=str(number))
        whole = run(engine, request).token_ids
        cut = len(whole) // 2
        tight.add_request(continued(request, tuple(whole[:cut])))
        expected[str(number)] = whole[cut:]
    done = run_to_end(tight)
    assert {request_id: found.token_ids for request_id, found in done.items()} == expected
    assert tight.stats().num_preemptions > 0, "memory was not short"
    tight.close()


def test_the_answer_so_far_is_found_in_the_prefix_cache_and_is_no_part_of_the_prompt(engine: Engine) -> None:
    request = replace(request_of(temperature=0.0, max_tokens=40), prompt_token_ids=PROMPT[::-1])
    whole = run(engine, request)
    hits = engine.stats().prefix_cache_hits
    rest = run(engine, continued(request, tuple(whole.token_ids[:30])))
    assert engine.stats().prefix_cache_hits - hits == (len(PROMPT) + 29) // 4 * 4
    assert rest.num_cached_tokens == len(PROMPT)


def test_prompt_logprobs_come_once_and_can_come_late(engine: Engine) -> None:
    request = request_of(temperature=0.0, prompt_logprobs=1)
    whole = run(engine, request)
    made = tuple(whole.token_ids[:5])
    assert run(engine, continued(request, made)).prompt_logprobs is None
    late = run(engine, continued(request, made, has_prompt_logprobs=False))
    assert late.token_ids == whole.token_ids[5:]
    assert late.prompt_logprobs is not None
    assert whole.prompt_logprobs is not None
    assert len(late.prompt_logprobs) == len(PROMPT)
    found, expected = (
        [entry for entry in each[1:] if entry] for each in (late.prompt_logprobs, whole.prompt_logprobs)
    )
    assert numbers(found) == pytest.approx(numbers(expected), abs=1e-4)


@pytest.mark.parametrize(
    ("made", "params", "error", "message"),
    [
        (14, {}, InvalidRequestError, "has all of the 14 tokens"),
        (
            CONTEXT - len(PROMPT),
            {"max_tokens": None},
            ContextLengthError,
            "prompt and the answer so far have 128",
        ),
    ],
)
def test_an_answer_that_is_complete_is_refused(
    engine: Engine, made: int, params: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine.add_request(replace(request_of(**params), output_token_ids=(5,) * made))


def test_an_answer_that_memory_has_no_room_for_is_refused(saved: tuple[Path, AdapterSpec]) -> None:
    core = built(saved, kv_memory_bytes=20 * 4 * 2 * 3 * 32 * 4, max_model_len=None)
    request = replace(request_of(max_tokens=100), output_token_ids=(5,) * 70)
    with pytest.raises((CapacityError, ContextLengthError), match="the prompt and the answer so far have 91"):
        core.add_request(request)
    core.close()
