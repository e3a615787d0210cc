"""Compares two answers to one request: their texts up to a tie, and their log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.correctness.check import Check, within
from benchmarks.correctness.driving import Answer, answers
from loraplex.adapters.spec import AdapterSpec
from loraplex.core.request import EngineRequest
from loraplex.engine.core import Engine

NUM_TOP: Final = 20
FLOAT32_MARGIN: Final = 1e-3
"""Largest difference of log-probabilities in float32."""
NOISE_FACTOR: Final = 2.0
"""Two results that are both off by the rounding's error differ by twice as much at the most."""


def text_error(
    found: Sequence[int], expected: Sequence[int], lag: Callable[[int, int], float]
) -> tuple[float, int]:
    """Return how unlikely the token at the first difference is, and how many tokens agree before it.

    `lag(place, token)`: by how much that token's logit falls short of the one chosen there, in the run that
    `expected` is from. Two tokens that are almost equally likely are a tie, which rounding decides; what
    follows a tie are different texts, and is not compared. 0.0 for equal texts.
    """
    if len(found) != len(expected):
        return float("inf"), 0
    for place, (token, other) in enumerate(zip(found, expected, strict=True)):
        if token != other:
            return lag(place, token), place
    return 0.0, len(expected)


def answer_lag(answer: Answer) -> Callable[[int, int], float]:
    """The lag by an answer's own log-probabilities; infinite for tokens that are not among the likeliest."""

    def lag(place: int, token: int) -> float:
        at = answer.logprobs[place]
        return at.logprob - dict(at.top).get(token, float("-inf"))

    return lag


def text_and_logprob_checks(
    name: str,
    compared: str,
    *,
    plain: Mapping[str, Answer],
    scored: Mapping[str, Answer],
    expected: Mapping[str, Answer],
    margin: float,
    **details: float,
) -> list[Check]:
    """Greedy answers, by request, that came without log-probabilities and with them. `compared`: the first
    with the others, in words."""
    errors = [
        text_error(plain[each].token_ids, one.token_ids, answer_lag(one)) for each, one in expected.items()
    ]
    return [
        within(
            f"{name}, texts",
            f"greedy texts of {len(errors)} requests: {compared}; where one differs, by how much its token "
            "is less likely than the one chosen there (log-probabilities)",
            max(error for error, _ in errors),
            margin,
            texts_equal=sum(error == 0.0 for error, _ in errors),
            tokens_equal=sum(same for _, same in errors),
            tokens=sum(len(one.token_ids) for one in expected.values()),
            **details,
        ),
        within(
            f"{name}, log-probabilities",
            "of the likeliest tokens, as long as both agree on the text",
            max(logprob_error(scored[each], one) for each, one in expected.items()),
            margin,
            **details,
        ),
    ]


def alone_check(
    engine: Engine,
    compared: str,
    found: Iterable[tuple[EngineRequest, AdapterSpec | None, Sequence[int]]],
    tie: float,
) -> Check:
    """Texts that came of greedy requests, with what each gets alone in this engine; closes it."""
    errors = []
    for request, spec, token_ids in found:
        if spec is not None:
            engine.add_adapter(spec)
        params = replace(request.params, logprobs=NUM_TOP)
        (alone,) = answers(engine, [replace(request, params=params)]).values()
        errors.append(text_error(token_ids, alone.token_ids, answer_lag(alone)))
    engine.close()
    return within(
        "texts",
        f"{len(errors)} {compared} with those of each alone and memory for all; where one differs, by how "
        "much its token is less likely than the one chosen alone (log-probabilities)",
        max(error for error, _ in errors),
        tie,
        texts_equal=sum(error == 0.0 for error, _ in errors),
    )


def rounding_error(short: Answer, exact: Answer) -> float:
    """Return the largest error of tokens that are among the likeliest in both, as long as the texts agree."""
    worst = 0.0
    for here, there in zip(short.logprobs, exact.logprobs, strict=True):
        known = dict(there.top)
        worst = max([worst, *(abs(value - known[token]) for token, value in here.top if token in known)])
        if here.token_id != there.token_id:
            break
    return worst


def logprob_error(found: Answer, expected: Answer) -> float:
    """Return the largest error of the five likeliest tokens, which the other's twenty must contain."""
    worst = 0.0
    for here, there in zip(found.logprobs, expected.logprobs, strict=True):
        known = dict(there.top)
        worst = max(worst, *(abs(value - known.get(token, math.inf)) for token, value in here.top[:5]))
        if here.token_id != there.token_id:
            break
    return worst


def least_error(found: Answer, expected: Answer) -> float:
    """Return the error of the five likeliest tokens that is certain. Random weights give flat distributions:
    rounding moves a token past the last of the other's likeliest that are known."""
    worst = 0.0
    for here, there in zip(found.logprobs, expected.logprobs, strict=True):
        known = dict(there.top)
        last = min(known.values())
        errors = [
            abs(value - known[token]) if token in known else max(value - last, 0.0)
            for token, value in here.top[:5]
        ]
        worst = max(worst, *(error if math.isfinite(error) else math.inf for error in errors))
        if here.token_id != there.token_id:
            break
    return worst
