from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from serving_fakes import FakeEngine, Script, says, tiny_tokenizer

from loraplex.core.errors import AdapterError, EngineDeadError, InvalidRequestError, LoraplexError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason
from loraplex.core.sampling import MAX_SEED, SamplingParams
from loraplex.core.tenants import Caller
from loraplex.engine.text_engine import TextDelta, TextEngine

PROMPT = [10, 11, 12]


def make_engine(script: Callable[[EngineRequest], Script], **options: Any) -> tuple[TextEngine, FakeEngine]:
    engine = FakeEngine(script)
    defaults: dict[str, Any] = {"max_model_len": 64, "vocab_size": 400}
    return TextEngine(engine=engine, tokenizer=tiny_tokenizer(), **{**defaults, **options}), engine


def collect(
    text_engine: TextEngine, params: SamplingParams, prompts: Sequence[Sequence[int]] = (PROMPT,)
) -> list[TextDelta]:
    async def run() -> list[TextDelta]:
        stream = text_engine.stream(text_engine.check(prompts, params), adapter=None, request_id="r")
        return [delta async for batch in stream for delta in batch]

    return asyncio.run(run())


def text_of(deltas: Sequence[TextDelta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def test_text_arrives_as_it_is_made_and_the_last_delta_says_why_it_ended() -> None:
    text_engine, _ = make_engine(says("Hello 😀 wörld", num_cached_tokens=2))
    deltas = collect(text_engine, SamplingParams())
    assert text_of(deltas) == "Hello 😀 wörld"
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].num_cached_tokens == 2


def test_choices_of_several_prompts_are_counted_through() -> None:
    def script(request: EngineRequest) -> Script:
        return Script(token_ids=[request.prompt_token_ids[0], 20 if request.params.seed == 20 else 21])

    text_engine, engine = make_engine(script)
    deltas = collect(text_engine, SamplingParams(n=2, seed=20), prompts=[[30], [40]])
    tokens = {c: [t for d in deltas if d.choice == c for t in d.token_ids] for c in range(4)}
    assert tokens == {0: [30, 20], 1: [30, 21], 2: [40, 20], 3: [40, 21]}
    assert len({request.request_id for request in engine.requests}) == 4
    assert all(request.params.n == 1 for request in engine.requests)
    assert {(request.tenant, request.priority) for request in engine.requests} == {("", 0)}


def test_every_choice_has_the_caller_of_its_request() -> None:
    text_engine, engine = make_engine(says("Hello"))

    async def run() -> None:
        checked = text_engine.check([[30], [40]], SamplingParams(n=2))
        caller = Caller(tenant="acme", priority=-3, slo_ttft_s=2.0, cache_salt="acme/x")
        stream = text_engine.stream(checked, adapter=None, request_id="r", caller=caller)
        async for _ in stream:
            pass

    asyncio.run(run())
    found = [(each.tenant, each.priority, each.slo_ttft_s, each.cache_salt) for each in engine.requests]
    assert found == [("acme", -3, 2.0, "acme/x")] * 4


def seeds_of(seed: int, n: int) -> list[int | None]:
    text_engine, engine = make_engine(says("a"))
    collect(text_engine, SamplingParams(n=n, seed=seed))
    return [request.params.seed for request in engine.requests]


@pytest.mark.parametrize("seed", [0, 1, -1, MAX_SEED, -MAX_SEED - 1])
def test_the_first_choice_has_the_seed_itself_and_the_others_have_the_same_ones_each_time(seed: int) -> None:
    seeds = seeds_of(seed, n=4)
    assert seeds[0] == seed
    assert seeds == seeds_of(seed, n=4)
    assert seeds[:2] == seeds_of(seed, n=2)


def test_requests_with_adjacent_seeds_share_no_choice() -> None:
    seeds = [seed for first in range(20) for seed in seeds_of(first, n=8)]
    assert len(set(seeds)) == len(seeds)


def test_without_a_seed_siblings_have_none() -> None:
    text_engine, engine = make_engine(says("a"))
    collect(text_engine, SamplingParams(n=2))
    assert [request.params.seed for request in engine.requests] == [None, None]


@pytest.mark.parametrize("n", [1, 2])
def test_a_stop_string_cuts_the_text_and_cancels_the_request(n: int) -> None:
    text_engine, engine = make_engine(says("Hello world! How are you?", pause_after=12))
    deltas = collect(text_engine, SamplingParams(stop=("d! H",), n=n))
    assert text_of(deltas) == "Hello worl"
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop == "d! H"
    assert len(engine.cancelled) == n


@pytest.mark.parametrize("min_tokens", [0, 1])
@pytest.mark.parametrize("tokens_per_output", [1, 3, 1000])
def test_tokens_behind_a_stop_string_do_not_count_however_outputs_were_merged(
    tokens_per_output: int, min_tokens: int
) -> None:
    text = "Hello world! How are you today?"
    text_engine, _ = make_engine(says(text, tokens_per_output=tokens_per_output))
    params = SamplingParams(stop=("world",), logprobs=0, min_tokens=min_tokens)
    deltas = collect(text_engine, params)
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    entries = [entry.token_id for delta in deltas for entry in delta.logprobs]
    tokenizer = tiny_tokenizer()
    whole = tokenizer.encode(text)
    expected = next(whole[:n] for n in range(len(whole)) if "world" in tokenizer.decode(whole[:n]))
    assert token_ids == entries == expected
    assert (text_of(deltas), deltas[-1].stop) == ("Hello ", "world")
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_a_stop_string_can_be_kept_in_the_text() -> None:
    text_engine, _ = make_engine(says("Hello world! How"))
    deltas = collect(text_engine, SamplingParams(stop=("world",), include_stop_str_in_output=True))
    assert text_of(deltas) == "Hello world"


def test_text_withheld_for_a_stop_string_comes_at_the_end() -> None:
    text_engine, _ = make_engine(says("Hello wor"))
    deltas = collect(text_engine, SamplingParams(stop=("world",)))
    assert text_of(deltas) == "Hello wor"
    assert deltas[-1].stop is None


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens() -> None:
    text_engine, _ = make_engine(says("Hello Hello Hello"))
    first = len(tiny_tokenizer().encode("Hello"))
    deltas = collect(text_engine, SamplingParams(stop=("Hello",), min_tokens=first))
    assert text_of(deltas) == "Hello "


def test_a_stop_token_the_caller_listed_is_reported_and_the_end_token_is_not() -> None:
    text_engine, _ = make_engine(says("Hello"))
    assert collect(text_engine, SamplingParams(stop_token_ids=(2,)))[-1].stop == 2
    assert collect(text_engine, SamplingParams())[-1].stop is None


@pytest.mark.parametrize(
    ("params", "num_sampled"),
    [
        pytest.param({}, 4, id="with the end token"),
        pytest.param({"stop_token_ids": (2,)}, 4, id="with a stop token of the caller"),
        pytest.param({"max_tokens": 3}, 3, id="at the length there is no end token"),
        pytest.param({"stop": ("w",)}, 3, id="a stop token behind a stop string is not counted"),
    ],
)
@pytest.mark.parametrize("tokens_per_output", [1, 1000])
def test_every_token_the_model_generated_is_counted(
    params: dict[str, Any], num_sampled: int, tokens_per_output: int
) -> None:
    token_ids = [tiny_tokenizer().encode(letter)[0] for letter in "how"]
    script = Script(token_ids=token_ids, tokens_per_output=tokens_per_output)
    text_engine, _ = make_engine(lambda request: script)
    deltas = collect(text_engine, SamplingParams(**params))
    assert sum(delta.num_sampled for delta in deltas) == num_sampled
    assert [token_id for delta in deltas for token_id in delta.token_ids] == token_ids


def test_logprobs_carry_the_bytes_of_their_tokens() -> None:
    text_engine, _ = make_engine(says("Hello wörld"))
    deltas = collect(text_engine, SamplingParams(logprobs=2, prompt_logprobs=0))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert b"".join(entry.piece for entry in entries).decode() == "Hello wörld"
    assert all(len(entry.top) == 2 for entry in entries)
    [prompt] = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    assert [entry.token_id for entry in prompt] == PROMPT
    assert [entry.logprob is None for entry in prompt] == [True, False, False]


def test_bad_words_become_tokens_as_they_begin_an_answer_and_after_a_space() -> None:
    text_engine, engine = make_engine(says("Hello"))
    collect(text_engine, SamplingParams(bad_words=("dog", " the lazy", "x")))
    tokenizer, found = text_engine.tokenizer, engine.requests[0].params.bad_word_ids
    texts = {tokenizer.decode(ids) for ids in found}
    assert {"dog", "the lazy", "x"} <= texts <= {"dog", " dog", "the lazy", " the lazy", "x", " x"}
    assert all(len(tokenizer.encode(tokenizer.decode(ids))) == len(ids) for ids in found)


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    text_engine, engine = make_engine(says("Hello"))
    collect(text_engine, SamplingParams())
    assert engine.requests[0].params.max_tokens == 64 - len(PROMPT)
    assert engine.requests[0].eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("prompt", "params", "param", "words"),
    [
        ([], {}, "prompt", ["empty"]),
        ([400], {}, "prompt", ["400", "399"]),
        ([-1], {}, "prompt", ["-1"]),
        ([1] * 64, {}, "prompt", ["64 tokens", "context length is 64"]),
        ([1] * 65, {"max_tokens": 1}, "prompt", ["65 tokens", "context length is 64"]),
        ([1] * 60, {"max_tokens": 5}, "max_tokens", ["60", "5", "65", "64"]),
        ([1] * 60, {"min_tokens": 5}, "min_tokens", ["60", "4", "64"]),
        ([1], {"logit_bias": ((400, 1.0),)}, "logit_bias", ["400"]),
        ([1], {"stop_token_ids": (401,)}, "stop_token_ids", ["401"]),
        ([1], {"bad_words": (" ",)}, "bad_words", ["empty"]),
        ([1], {"stop": ("x" * 1025,)}, "stop", ["1024"]),
    ],
)
def test_what_cannot_run_is_refused_with_the_numbers(
    prompt: list[int], params: dict[str, Any], param: str, words: list[str]
) -> None:
    text_engine, engine = make_engine(says("Hello"))
    with pytest.raises(InvalidRequestError) as caught:
        collect(text_engine, SamplingParams(**params), prompts=[prompt])
    assert caught.value.param == param
    assert all(word in str(caught.value) for word in words)
    assert engine.requests == []


@pytest.mark.parametrize("n", [1, 3])
def test_closing_the_stream_cancels_everything_that_runs(n: int) -> None:
    text_engine, engine = make_engine(says("Hello world", pause_after=1))

    async def run() -> None:
        stream = text_engine.stream(
            text_engine.check([PROMPT], SamplingParams(n=n)), adapter=None, request_id="r"
        )
        async with aclosing(stream):
            await anext(stream)

    asyncio.run(run())
    assert len(engine.cancelled) == n


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("failure", "expected"),
    [(EngineDeadError("it died"), EngineDeadError), (None, LoraplexError)],
)
def test_a_failure_in_the_engine_is_raised(n: int, failure: Exception | None, expected: type) -> None:
    text_engine, _ = make_engine(says("Hello world! How are you?", fail_after=2, failure=failure))
    with pytest.raises(expected, match="it died" if failure else "out of luck"):
        collect(text_engine, SamplingParams(n=n))


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("param", ["model", None])
def test_a_failure_of_the_adapter_is_told_from_one_of_the_engine(n: int, param: str | None) -> None:
    class Failing(FakeEngine):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
            reason = FinishReason.ERROR
            yield EngineOutput(
                request_id=request.request_id, finish_reason=reason, error="lost", error_param=param
            )

    text_engine, _ = make_engine(says("Hello"))
    text_engine.engine = Failing(says("Hello"))
    with pytest.raises(LoraplexError, match="lost") as caught:
        collect(text_engine, SamplingParams(n=n))
    assert isinstance(caught.value, AdapterError) == (param == "model")


def test_a_slow_reader_gets_what_it_missed_in_one_batch() -> None:
    text_engine, _ = make_engine(says("Hello world! How are you today?"))

    async def run() -> list[int]:
        sizes = []
        checked = text_engine.check([PROMPT], SamplingParams(n=2))
        async for batch in text_engine.stream(checked, adapter=None, request_id="r"):
            sizes.append(len(batch))
            for _ in range(1000):
                await asyncio.sleep(0)
        return sizes

    assert len(asyncio.run(run())) == 2
