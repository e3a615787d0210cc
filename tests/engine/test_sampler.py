"""Sampling: each option does what it says, and a seed means the same text in any company."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

from loraplex.core.errors import InvalidRequestError
from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.sampler import SamplingState, sample

VOCAB = 1000
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 2


def state_of(
    *, outputs: tuple[int, ...] = (), prompt: tuple[int, ...] = (999,), **params: Any
) -> SamplingState:
    request = EngineRequest(
        request_id="r", prompt_token_ids=list(prompt), params=SamplingParams(**params), eos_token_ids=(2,)
    )
    state = SamplingState(request)
    for token in outputs:
        state.accept(token)
    return state


def draw(logits: torch.Tensor = LOGITS, **options: Any) -> int:
    (chosen,) = sample(logits[None], [state_of(**options)])
    assert chosen.token_id is not None
    return chosen.token_id


def draws(count: int, logits: torch.Tensor = LOGITS, **options: Any) -> list[int]:
    return [draw(logits, seed=seed, **options) for seed in range(count)]


def test_temperature_zero_takes_the_likeliest() -> None:
    assert draw(temperature=0.0) == int(LOGITS.argmax())


@pytest.mark.parametrize("temperature", [1e-40, 1e-38, 1e-6])
def test_a_temperature_as_good_as_zero_takes_the_likeliest(temperature: float) -> None:
    assert draw(temperature=temperature) == int(LOGITS.argmax())


def test_the_lowest_temperature_that_is_drawn_from_is_finite() -> None:
    assert draw(100 * LOGITS, temperature=1e-5) == int(LOGITS.argmax())


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    counts = Counter(draws(4000, logits))
    for token, probability in enumerate([0.5, 0.2, 0.2, 0.1]):
        deviation = math.sqrt(4000 * probability * (1 - probability))
        assert abs(counts[token] - 4000 * probability) < 4 * deviation


def test_low_temperature_sharpens() -> None:
    hot, cold = Counter(draws(300, temperature=2.0)), Counter(draws(300, temperature=0.3))
    assert len(cold) < len(hot)


@pytest.mark.parametrize("top_k", [1, 5, 2000])
def test_top_k_keeps_the_k_likeliest(top_k: int) -> None:
    allowed = set(LOGITS.topk(min(top_k, VOCAB)).indices.tolist())
    found = set(draws(200, top_k=top_k, temperature=5.0))
    assert found <= allowed
    assert top_k == 1 or len(found) > 1


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.999])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, temperature: float) -> None:
    probabilities = torch.softmax(LOGITS / temperature, dim=-1)
    ordered, ids = probabilities.sort(descending=True)
    size = int((ordered.cumsum(0) < top_p).sum()) + 1
    assert set(draws(300, top_p=top_p, temperature=temperature)) <= set(ids[:size].tolist())


def test_a_nucleus_wider_than_the_first_look_is_still_whole() -> None:
    flat = torch.zeros(VOCAB)
    assert len(set(draws(600, flat, top_p=0.9))) > 400


def test_min_p_drops_what_is_far_below_the_best() -> None:
    probabilities = torch.softmax(LOGITS, dim=-1)
    allowed = set((probabilities >= 0.2 * probabilities.max()).nonzero()[:, 0].tolist())
    assert set(draws(300, min_p=0.2)) <= allowed


def test_a_seed_gives_the_same_token_in_any_company() -> None:
    rows = torch.stack([LOGITS, LOGITS.flip(0), LOGITS * 0.5, LOGITS])
    states = [
        state_of(seed=11),
        state_of(seed=5, top_p=0.9),
        state_of(temperature=0.0),
        state_of(seed=11, outputs=(4,)),
    ]
    alone = [sample(row[None], [state])[0].token_id for row, state in zip(rows, states, strict=True)]
    assert [chosen.token_id for chosen in sample(rows, states)] == alone
    assert alone[0] != alone[3], "the second token of a text is a draw of its own"


def test_without_a_seed_draws_differ() -> None:
    assert len({draw(temperature=3.0) for _ in range(40)}) > 5


def test_penalties_act_on_what_was_said() -> None:
    logits = torch.tensor([3.0, 2.9, -1.0])
    greedy = {"temperature": 0.0, "outputs": (0,), "prompt": (2,)}
    assert draw(logits, **greedy) == 0
    assert draw(logits, presence_penalty=0.2, **greedy) == 1
    assert draw(logits, frequency_penalty=0.2, **greedy) == 1
    assert draw(logits, repetition_penalty=1.1, **greedy) == 1
    assert draw(logits, repetition_penalty=1.1, temperature=0.0, prompt=(0,)) == 1
    assert draw(logits, presence_penalty=0.2, temperature=0.0, prompt=(0,)) == 0


def test_frequency_counts_and_presence_does_not() -> None:
    logits = torch.tensor([3.0, 2.5])
    assert draw(logits, temperature=0.0, presence_penalty=0.2, outputs=(0, 0, 0)) == 0
    assert draw(logits, temperature=0.0, frequency_penalty=0.2, outputs=(0, 0, 0)) == 1


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    assert (
        draw(torch.tensor([-1.0, -1.1]), temperature=0.0, repetition_penalty=1.5, outputs=(0,), prompt=(0,))
        == 1
    )


def test_bad_words_do_not_come_even_where_they_begin_in_earlier_tokens() -> None:
    best, second, third = LOGITS.topk(3).indices.tolist()
    assert draw(temperature=0.0, bad_word_ids=((best,),)) == second
    assert best not in draws(100, temperature=0.01, bad_word_ids=((best,),))
    words = ((5, 6, best), (7, second))
    assert draw(temperature=0.0, bad_word_ids=words, outputs=(5, 6)) == second
    assert draw(temperature=0.0, bad_word_ids=(*words, (second,)), outputs=(5, 6)) == third
    for outputs in ((), (6,), (6, 5), (5, 6, 7)):
        assert draw(temperature=0.0, bad_word_ids=words, outputs=outputs) == best
    begun = EngineRequest(
        request_id="r",
        prompt_token_ids=[1],
        params=SamplingParams(bad_word_ids=words),
        output_token_ids=(4, 5, 6),
    )
    assert SamplingState(begun).bad_tokens() == [best]
    # The prompt is no part of the answer.
    assert draw(temperature=0.0, bad_word_ids=words, prompt=(5, 6)) == best


def test_logit_bias_adds() -> None:
    assert draw(temperature=0.0, logit_bias=((17, 100.0),)) == 17
    best = int(LOGITS.argmax())
    assert draw(temperature=0.0, logit_bias=((best, -100.0),)) != best


def test_min_tokens_holds_every_end_back() -> None:
    logits = torch.tensor([0.0, 1.0, 9.0, 8.0])  # 2 is the end token
    options = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (3,)}
    assert draw(logits, **options) == 1
    assert draw(logits, outputs=(1, 1), **options) == 2


def test_an_end_token_beyond_the_vocabulary_is_no_harm() -> None:
    assert draw(torch.tensor([0.0, 1.0]), temperature=0.0, min_tokens=2, stop_token_ids=(9999,)) == 1


def test_logprobs_are_the_models_own() -> None:
    (chosen,) = sample(LOGITS[None], [state_of(temperature=0.0, logprobs=3, logit_bias=((5, 100.0),))])
    expected = torch.log_softmax(LOGITS, dim=-1)
    assert chosen.logprob is not None
    assert chosen.token_id == 5
    assert chosen.logprob.logprob == pytest.approx(float(expected[5]), abs=1e-5)
    assert [token for token, _ in chosen.logprob.top] == LOGITS.topk(3).indices.tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_fail_their_row_alone(bad: float) -> None:
    rows = torch.stack([LOGITS, LOGITS])
    rows[0, 9] = bad
    broken, sound = sample(rows, [state_of(temperature=0.0), state_of(temperature=0.0)])
    assert broken.token_id is None
    assert sound.token_id == int(LOGITS.argmax())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -3),
        ("min_p", -0.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("logprobs", 21),
        ("n", 0),
        ("seed", 2**63),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((-1, 1.0),)),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 1.5}, "top_k must be a whole number, not 1.5"),
        ({"n": True}, "n must be a number, not True"),
        ({"max_tokens": "x"}, "max_tokens must be a number, not 'x'"),
        ({"logprobs": 2.5}, "logprobs must be a whole number"),
        ({"temperature": None}, "temperature must be a number, not None"),
        ({"top_p": []}, r"top_p must be a number, not \[\]"),
        ({"seed": "x"}, "seed must be a number"),
        ({"stop": "END"}, "stop must be a tuple of texts, not 'END'"),
        ({"stop": 5}, "stop must be a tuple of texts"),
        ({"bad_words": ("a", 5)}, "bad_words must be a tuple of texts"),
        ({"stop_token_ids": (1.5,)}, "stop_token_ids must be a whole number"),
        ({"logit_bias": {5: 1.0}}, "logit_bias must be a tuple of pairs"),
    ],
)
def test_options_of_another_type_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    """They would fail in a step, with all requests."""
    with pytest.raises(InvalidRequestError, match=words) as caught:
        SamplingParams(**options)
    assert caught.value.param == next(iter(options))
