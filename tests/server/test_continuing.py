"""A client sees the answer of an undisturbed engine while the engines of its request die or move. With real
engines on a tiny model, and the text made from their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_fakes import tiny_tokenizer
from tiny import save_adapter, save_model

from loraplex.adapters.peft_reader import read_adapter
from loraplex.core.continuation import AnswerSoFar, request_id_of
from loraplex.core.errors import EngineClosedError, EngineDeadError, RequestMovedError
from loraplex.core.request import EngineOutput, EngineRequest, FinishReason, TokenLogprob
from loraplex.core.sampling import SamplingParams
from loraplex.engine.async_local import LocalAsyncEngine
from loraplex.engine.build import build_core
from loraplex.engine.options import EngineOptions
from loraplex.engine.text_engine import LogprobText, TextDelta, TextEngine
from loraplex.model.config import load_config
from loraplex.server.continuing import (
    Attempt,
    EngineSilentError,
    NotTakenError,
    Outputs,
    Serving,
    continuing,
)

PROMPT = [11, 42, 7, 99, 150, 42]
CONTEXT = 256
MAX_IN_A_ROW, MAX_IN_ALL = 3, 10
"""The limits of a fleet."""
ONE = {"max_in_a_row": 1, "max_in_all": 1}
NUM_BEFORE_TOKENS = 2
"""Number of outputs above which an engine has reported a token of a request."""
NUMBERS = count()
"""Numbers of requests: an engine may still compute the last tokens of one that has ended early."""


@dataclass(frozen=True)
class Fate:
    """The way an engine loses a request: after this many outputs. An engine may have computed more than it
    reported."""

    after: int
    how: str


@dataclass
class _Replicas:
    """Two engines, each with its own memory."""

    engines: list[LocalAsyncEngine]
    adapter: str


@lru_cache(maxsize=1)
def replicas() -> _Replicas:
    root = Path(mkdtemp(prefix="loraplex-continuing-"))
    model = save_model(root / "base", num_hidden_layers=2, vocab_size=400)
    save_adapter(root / "adapter", model, rank=4)
    spec = read_adapter(root / "adapter", load_config(root / "base").shape)
    engines = []
    for _ in range(2):
        options = EngineOptions(
            model=str(root / "base"), kv_memory_bytes=1 << 20, block_size=4, max_model_len=CONTEXT
        )
        engines.append(LocalAsyncEngine(core := build_core(options)))
        core.add_adapter(spec)
    return _Replicas(engines, spec.version)


@pytest.fixture(scope="module", autouse=True)
def closed_at_the_end() -> Iterator[None]:
    yield
    for engine in replicas().engines:
        engine.close()
    replicas.cache_clear()


def ignore(output: EngineOutput) -> None:
    """Ignore an output."""


@asynccontextmanager
async def serving(outputs: Outputs) -> AsyncIterator[Attempt]:
    """Yield the attempt with these outputs."""
    async with aclosing(outputs):
        yield Attempt(outputs.__anext__, ignore)


class Perilous:
    """An AsyncEngine whose requests are lost by one engine after the other, according to their fates."""

    def __init__(self, fates: list[Fate]) -> None:
        self._fates = fates
        self.attempts: list[EngineRequest] = []

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        fates = iter(self._fates)
        number = 0

        async def give(attempt: EngineRequest) -> Serving:
            nonlocal number
            number += 1
            self.attempts.append(attempt)
            outputs = self._lost(replicas().engines[number % 2].generate(attempt), next(fates, None))
            return serving(outputs)

        limits = {"max_in_a_row": MAX_IN_A_ROW, "max_in_all": MAX_IN_ALL}
        return continuing(request, give, **limits, engines="engines")

    async def _lost(self, source: AsyncIterator[EngineOutput], fate: Fate | None) -> Outputs:
        errors = {
            "kill": EngineDeadError("killed"),
            "silence": EngineSilentError("silent"),
            "move": RequestMovedError("moved"),
        }
        num_told = 0
        async with aclosing(source) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if fate is not None and num_told == fate.after:
                    raise errors[fate.how]
                num_told += 1
                yield output

    async def add_adapter(self, spec: Any) -> None:
        raise NotImplementedError

    async def remove_adapter(self, version: str) -> None:
        raise NotImplementedError

    async def stats(self) -> Any:
        raise NotImplementedError


@dataclass(kw_only=True)
class Seen:
    """Everything that a client sees of one choice."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_sampled: int = 0
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    logprobs: tuple[LogprobText, ...] = ()
    prompt_logprobs: tuple[LogprobText, ...] | None = None

    def add(self, delta: TextDelta) -> None:
        assert self.finish_reason is None, "there was more after the end"
        self.text += delta.text
        self.token_ids += delta.sampled_ids
        self.num_sampled += delta.num_sampled
        self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "they came twice"
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop = delta.finish_reason, delta.stop

    @property
    def without_values(self) -> Seen:
        """Return it without what may differ in the last digits."""
        return replace(
            self,
            logprobs=tuple(replace(entry, logprob=None, top=()) for entry in self.logprobs),
            prompt_logprobs=None,
        )

    @property
    def values(self) -> list[float]:
        entries = (*self.logprobs, *(self.prompt_logprobs or ()))
        return [entry.logprob for entry in entries if entry.logprob is not None]


def answers(engine: Perilous, params: SamplingParams, adapter: str | None) -> list[Seen]:
    text = TextEngine(engine=engine, tokenizer=tiny_tokenizer(), max_model_len=CONTEXT, vocab_size=400)

    async def read() -> list[Seen]:
        seen = [Seen() for _ in range(params.n)]
        async for batch in text.stream(
            text.check([PROMPT], params), adapter=adapter, request_id=f"r{next(NUMBERS)}"
        ):
            for delta in batch:
                seen[delta.choice].add(delta)
        return seen

    try:
        return asyncio.run(read())
    finally:
        text.prompts.close()


def counts_in_a_row(fate: Fate) -> bool:
    return fate.how != "move" and fate.after <= NUM_BEFORE_TOKENS


fates = st.lists(
    st.builds(Fate, after=st.integers(0, 6), how=st.sampled_from(["kill", "silence", "move"])), max_size=6
)
sampling = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 24),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 5),
        "n": st.integers(1, 2),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.4]),
        "stop_token_ids": st.sampled_from([(), tuple(range(0, 400, 15))]),
        "logprobs": st.sampled_from([None, 2]),
        "prompt_logprobs": st.sampled_from([None, 1]),
    }
)


@settings(max_examples=examples(30, 60), deadline=None)
@given(
    fates=fates.filter(lambda fates: sum(map(counts_in_a_row, fates)) < MAX_IN_A_ROW),
    fields=sampling,
    min_tokens=st.integers(0, 10),
    stop_at=st.none() | st.integers(0, 20),
    on_adapter=st.booleans(),
)
def test_an_answer_is_the_same_whatever_becomes_of_its_engines(
    fates: list[Fate], fields: dict[str, Any], min_tokens: int, stop_at: int | None, on_adapter: bool
) -> None:
    adapter = replicas().adapter if on_adapter else None
    params = SamplingParams(**fields, min_tokens=min(min_tokens, fields["max_tokens"]))
    expected = answers(Perilous([]), params, adapter)
    if stop_at is not None and (stop := expected[0].text[stop_at : stop_at + 2]):
        params = replace(params, stop=(stop,))
        expected = answers(Perilous([]), params, adapter)
    found = answers(Perilous(fates), params, adapter)
    assert [seen.without_values for seen in found] == [seen.without_values for seen in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.values == pytest.approx(other.values, abs=1e-4)
        assert (one.prompt_logprobs is None) == (other.prompt_logprobs is None)


@settings(max_examples=10, deadline=None)
@given(
    fates=st.lists(
        st.builds(Fate, after=st.just(0), how=st.sampled_from(["kill", "silence"])), min_size=3, max_size=4
    )
)
def test_a_request_with_which_too_many_engines_die_is_given_up(fates: list[Fate]) -> None:
    engine = Perilous(fates)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with pytest.raises(EngineDeadError, match="3 engines died or fell silent one after the other"):
        answers(engine, params, None)
    assert len(engine.attempts) == MAX_IN_A_ROW


def test_who_dies_after_a_token_is_not_held_against_a_request_but_many_are() -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=[5], params=SamplingParams(max_tokens=100))
    num_given = 0

    async def read(tokens: list[int]) -> list[int]:
        """`tokens`: number of tokens that each engine generates before it dies."""
        nonlocal num_given
        num_given, left = 0, iter(tokens)

        async def give(attempt: EngineRequest) -> Serving:
            async def outputs() -> Outputs:
                for _ in range(next(left)):
                    yield EngineOutput(request_id=attempt.request_id, token_ids=(1,))
                raise EngineDeadError("killed")

            nonlocal num_given
            num_given += 1
            return serving(outputs())

        told = continuing(request, give, max_in_a_row=3, max_in_all=6, engines="engines")
        return [token async for output in told for token in output.token_ids]

    for tokens, expected in (([4, 0, 0], 3), ([0, 4, 0, 4, 0, 0], 6), ([1] * 9, 6)):
        with pytest.raises(EngineDeadError, match=f"{expected} engines died"):
            asyncio.run(read(tokens))
        assert num_given == expected


def test_every_attempt_has_an_id_of_its_own_and_what_was_told_before() -> None:
    engine = Perilous([Fate(0, "kill"), Fate(3, "move"), Fate(2, "kill")])
    # Many: on a busy machine the engine has generated several by the time one is taken.
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    (seen,) = answers(engine, params, None)
    first, *others = [attempt.request_id for attempt in engine.attempts]
    assert others == [f"{first}+1", f"{first}+2", f"{first}+3"]
    assert {request_id_of(request_id) for request_id in (first, *others)} == {first}
    lengths = [len(attempt.output_token_ids) for attempt in engine.attempts]
    assert lengths[:2] == [0, 0]
    assert 0 < lengths[2] <= lengths[3]
    for attempt in engine.attempts:
        assert attempt.output_token_ids == seen.token_ids[: len(attempt.output_token_ids)]
        assert (attempt.params.prompt_logprobs is None) == bool(attempt.output_token_ids)


def test_what_a_request_found_when_it_came_is_told_to_the_end() -> None:
    request = EngineRequest(
        request_id="r", prompt_token_ids=[5], params=SamplingParams(max_tokens=9), tenant="acme", priority=2
    )
    answer = AnswerSoFar(request)
    answer.attempt()
    first = EngineOutput(request_id="r", token_ids=(1, 2), num_cached_tokens=3, adapter_hit=False)
    assert answer.add(EngineOutput(request_id="r")) is not None
    assert answer.add(first) == first
    again = answer.attempt()
    assert (again.tenant, again.priority) == ("acme", 2)
    assert answer.add(EngineOutput(request_id=again.request_id)) is None
    told = answer.add(
        EngineOutput(request_id=again.request_id, token_ids=(4,), num_cached_tokens=5, adapter_hit=True)
    )
    assert told == replace(first, token_ids=(4,))


def test_an_answer_that_only_lacks_its_end_is_ended() -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=[5], params=SamplingParams(max_tokens=2))
    entry = TokenLogprob(token_id=1, logprob=-1.0)

    async def give(attempt: EngineRequest) -> Serving:
        async def outputs() -> Outputs:
            yield EngineOutput(request_id="r", token_ids=(1, 1), logprobs=(entry, entry))
            raise EngineDeadError("before it said so")

        return serving(outputs())

    async def read() -> list[EngineOutput]:
        return [output async for output in continuing(request, give, **ONE, engines="engines")]

    told = asyncio.run(read())
    assert [output.token_ids for output in told] == [(1, 1), ()]
    assert told[-1].finish_reason is FinishReason.LENGTH


def not_taken(*, is_last: bool) -> NotTakenError:
    error = NotTakenError("no")
    error.is_last = is_last
    return error


@pytest.mark.parametrize(
    ("error", "words", "num_asked"),
    [(EngineDeadError("killed"), "2 engines died", 2), (not_taken(is_last=True), "^no$", 1)],
)
def test_an_engine_that_is_well_says_in_the_end_why_it_did_not_serve(
    error: Exception, words: str, num_asked: int
) -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=[5], params=SamplingParams(max_tokens=2))
    num_given = 0

    async def give(attempt: EngineRequest) -> Serving:
        async def outputs() -> Outputs:
            yield EngineOutput(request_id="r")
            raise error

        nonlocal num_given
        num_given += 1
        return serving(outputs())

    async def read() -> None:
        async for _ in continuing(request, give, max_in_a_row=2, max_in_all=2, engines="engines"):
            pass

    with pytest.raises(EngineDeadError, match=words):
        asyncio.run(read())
    assert num_given == num_asked


def test_nobody_is_tried_again_who_is_closed_or_not_there() -> None:
    request = EngineRequest(request_id="r", prompt_token_ids=[5], params=SamplingParams(max_tokens=2))
    num_given = 0

    async def close(attempt: EngineRequest) -> Serving:
        async def outputs() -> Outputs:
            yield EngineOutput(request_id="r")
            raise EngineClosedError("shutting down")

        nonlocal num_given
        num_given += 1
        return serving(outputs())

    async def nobody(attempt: EngineRequest) -> Serving:
        nonlocal num_given
        num_given += 1
        raise EngineDeadError("nobody is there")

    async def read(give: Any) -> None:
        async for _ in continuing(request, give, **ONE, engines="engines"):
            pass

    with pytest.raises(EngineClosedError):
        asyncio.run(read(close))
    with pytest.raises(EngineDeadError, match="nobody is there"):
        asyncio.run(read(nobody))
    assert num_given == 2
