"""Section `batch`: a request's text does not depend on what else is in the batch.

Every request runs alone first, in an engine of its own kind; then all run at once in a fresh one, twice:
without log-probabilities, and with them, where the prefix cache may know a prompt. Both are deterministic in
their weights. In float32 both must agree. In bfloat16, products of other shapes are rounded in other places:
a tie is what this rounding cannot tell apart, and how much that is, is measured: by how much a request alone
in bfloat16 is off from the same in float32. Only the likeliest tokens are known, and random weights make
many tokens about as likely: so for bfloat16 the error that is certain is compared, and which tokens they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Final

import torch

from benchmarks.correctness.check import Check, Setting, holds, within
from benchmarks.correctness.comparing import (
    FLOAT32_MARGIN,
    NOISE_FACTOR,
    NUM_TOP,
    least_error,
    rounding_error,
    text_and_logprob_checks,
)
from benchmarks.correctness.driving import Answer, answers, bring_in, greedy_request, random_prompt
from benchmarks.correctness.random_engines import build, distinct_specs
from benchmarks.device_memory import release
from loraplex.core.request import EngineRequest
from loraplex.engine.core import Engine
from loraplex.model.shapes import config_of_shape

RANKS: Final = (8, 16, 32, 64)
_LEAST_SHARE: Final = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answers:
    """The answers by request: alone with log-probabilities, and all at once without them and with."""

    alone: dict[str, Answer]
    plain: dict[str, Answer]
    scored: dict[str, Answer]


def batch(setting: Setting) -> list[Check]:
    exact = _all_answers(setting, torch.float32)
    checks = [*_checks("float32", exact, FLOAT32_MARGIN), _shows(exact.alone, FLOAT32_MARGIN)]
    if setting.engine_dtype is torch.float32:
        return checks
    short = _all_answers(setting, setting.engine_dtype)
    noise = max(rounding_error(short.alone[name], one) for name, one in exact.alone.items())
    margin, details = round(NOISE_FACTOR * noise, 3), {"rounding_error": round(noise, 3)}
    texts = _checks("bfloat16", short, margin, **details)[0]
    return [
        *checks,
        texts,
        within(
            "bfloat16, log-probabilities",
            "of the likeliest tokens, as long as both agree on the text; one that is not among the other's "
            f"{NUM_TOP} likeliest is off by its distance to the last of these at least",
            max(least_error(short.scored[each], one) for each, one in short.alone.items()),
            margin,
            **details,
        ),
        _agreement(short),
    ]


def _agreement(short: _Answers) -> Check:
    """Check that the likeliest tokens are the same ones. Two adapters, or an adapter and the base model, have
    none in common (`_shows`): a request on another's adapter would share nothing."""
    least = min(_known_share(short.scored[each], one) for each, one in short.alone.items())
    return holds(
        "bfloat16, likeliest tokens",
        f"at least half of each request's five likeliest are among the {NUM_TOP} likeliest of the same alone",
        least >= _LEAST_SHARE,
        least_share=round(least, 3),
    )


def _known_share(found: Answer, expected: Answer) -> float:
    """Return the share of the five likeliest tokens that are among the other's likeliest, as long as both
    agree on the text."""
    is_known: list[bool] = []
    for here, there in zip(found.logprobs, expected.logprobs, strict=True):
        known = dict(there.top)
        is_known += [token in known for token, _ in here.top[:5]]
        if here.token_id != there.token_id:
            break
    return sum(is_known) / len(is_known)


def _all_answers(setting: Setting, dtype: torch.dtype) -> _Answers:
    (alone,) = _answers(setting, dtype, together=False)
    plain, scored = _answers(setting, dtype, together=True)
    return _Answers(alone=alone, plain=plain, scored=scored)


def _answers(setting: Setting, dtype: torch.dtype, *, together: bool) -> list[dict[str, Answer]]:
    """One by one with log-probabilities; or all at once, first without them, then with."""
    engine = build(setting.large_shape, setting, dtype=dtype)
    versions = _register(engine, setting)
    bring_in(engine, versions)
    scored = _requests(versions, setting, num_top=NUM_TOP)
    if together:
        found = [answers(engine, _requests(versions, setting, num_top=None)), answers(engine, scored)]
    else:
        found = [{name: one for request in scored for name, one in answers(engine, [request]).items()}]
    engine.close()
    del engine
    release()
    return found


def _register(engine: Engine, setting: Setting) -> list[str]:
    num_adapters = 4 if setting.tiny else 64
    specs = distinct_specs(
        "batch", setting.large_shape, num_adapters=num_adapters, ranks=RANKS, modules="all"
    )
    for spec in specs:
        engine.add_adapter(spec)
    return [spec.version for spec in specs]


def _requests(versions: list[str], setting: Setting, num_top: int | None) -> list[EngineRequest]:
    """One for each adapter, and one for the base after every eighth."""
    vocab_size = config_of_shape(setting.large_shape).shape.vocab_size
    num_tokens = 6 if setting.tiny else 24
    lanes: list[str | None] = []
    for index, version in enumerate(versions):
        lanes += [version, None] if index % 8 == 0 else [version]
    return [
        greedy_request(
            f"{index}-{version or 'base'}",
            random_prompt(3 + 37 * max(index, 2) % 150, vocab_size, seed=max(index, 2)),
            num_tokens,
            version,
            logprobs=num_top,
        )
        for index, version in enumerate(lanes)
    ]


def _checks(dtype: str, found: _Answers, margin: float, **details: float) -> list[Check]:
    return text_and_logprob_checks(
        dtype,
        "all in one batch with those of each alone",
        plain=found.plain,
        scored=found.scored,
        expected=found.alone,
        margin=margin,
        **details,
    )


def _shows(alone: dict[str, Answer], margin: float) -> Check:
    """The first three requests have one prompt: were adapters to change nothing, mixing them up would not."""
    first = [dict(one.logprobs[0].top) for one in list(alone.values())[:3]]
    nearest = min(
        max((abs(value - other[token]) for token, value in one.items() if token in other), default=math.inf)
        for one, other in combinations(first, 2)
    )
    return holds(
        "adapters show",
        "log-probabilities after one prompt, by two adapters and the base, differ by more than the tolerance",
        nearest > margin,
        least_difference=round(nearest, 3) if math.isfinite(nearest) else "no token in common",
    )
