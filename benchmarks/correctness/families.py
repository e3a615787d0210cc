"""Section `families`: every family against transformers on the same device, in float32 and bfloat16."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.correctness.check import Check, Setting, within
from benchmarks.correctness.checkpoints import FAMILIES, Expected, greedy, rounded, save_model
from benchmarks.correctness.comparing import text_error
from benchmarks.correctness.driving import Answer, answers, build, greedy_request, random_prompt
from benchmarks.device_memory import release
from loraplex.core.request import TokenLogprob

NUM_TOP = 20
SCORED_AND_PLAIN: tuple[dict[str, Any], ...] = ({"logprobs": NUM_TOP, "prompt_logprobs": NUM_TOP}, {})
"""The ways requests are sent: the host chooses tokens with log-probabilities, the device the others."""
FLOAT32_TOLERANCE = 2e-5
"""The largest error, as a share of the largest logit at its position."""
FLOAT32_MARGIN = 1e-4
BFLOAT16_MARGIN = 0.125
"""Two logits that differ by less count as a tie. Logits here spread by about one; those of the
likeliest tokens are near four, where bfloat16 itself counts in steps of 1/64, behind layers that each
round a dozen times."""
BFLOAT16_RATIO = 1.5
"""The engine's bfloat16 may be this many times worse than transformers', both measured against float32."""
MAX_STEP_TOKENS = 64
"""Long prompts are cut by this, and the later chunks attend to a paged prefix."""


def families(setting: Setting) -> list[Check]:
    names = ("llama", "qwen3") if setting.tiny else tuple(FAMILIES)
    with tempfile.TemporaryDirectory() as folder:
        return [check for name in names for check in _family(name, Path(folder) / name, setting)]


def _family(name: str, folder: Path, setting: Setting) -> list[Check]:
    model = save_model(folder, name, device=setting.torch_device, tiny=setting.tiny)
    vocab_size = model.config.vocab_size
    lengths, num_tokens = ((3, 80), 8) if setting.tiny else ((1, 16, 33, 150, 300), 32)
    prompts = [random_prompt(length, vocab_size, seed) for seed, length in enumerate(lengths)]
    exact = [greedy(model, prompt, num_tokens) for prompt in prompts]
    half = [greedy(rounded(model, torch.bfloat16), prompt, num_tokens) for prompt in prompts]
    del model
    release()
    scored, plain = _serve(folder, "float32", prompts, num_tokens, setting)
    checks = [
        within(
            f"{name}, float32, log-probabilities",
            f"the {NUM_TOP} likeliest tokens at every position of prompts and answers, with transformers",
            max(logprob_error(answer, want) for answer, want in zip(scored, exact, strict=True)),
            FLOAT32_TOLERANCE,
        ),
        _texts(f"{name}, float32, texts", scored + plain, exact + exact, FLOAT32_MARGIN),
    ]
    release()
    scored, plain = _serve(folder, "bfloat16", prompts, num_tokens, setting)
    release()
    checks.append(_texts(f"{name}, bfloat16, texts", scored + plain, half + half, BFLOAT16_MARGIN))
    return [*checks, _half_precision(name, scored, exact, half)]


def _serve(
    folder: Path, dtype: str, prompts: Sequence[list[int]], num_tokens: int, setting: Setting
) -> tuple[list[Answer], list[Answer]]:
    """All prompts in one batch, with log-probabilities and without."""
    engine = build(folder, dtype, setting, max_step_tokens=MAX_STEP_TOKENS)
    found = []
    for params in SCORED_AND_PLAIN:
        requests = [
            greedy_request(str(index), prompt, num_tokens, **params) for index, prompt in enumerate(prompts)
        ]
        done = answers(engine, requests)
        found.append([done[request.request_id] for request in requests])
    engine.close()
    return found[0], found[1]


def _texts(name: str, found: Sequence[Answer], expected: Sequence[Expected], margin: float) -> Check:
    errors = [
        text_error(answer.token_ids, want.token_ids, want.lag)
        for answer, want in zip(found, expected, strict=True)
    ]
    return within(
        name,
        "greedy texts with transformers; where one differs, transformers' logits of the two tokens",
        max(error for error, _ in errors),
        margin,
        texts=len(errors),
        texts_equal=sum(error == 0.0 for error, _ in errors),
        tokens_equal=sum(same for _, same in errors),
    )


def logprob_error(answer: Answer, want: Expected) -> float:
    """The largest difference of log-probabilities, in units of the largest logit at its position."""
    if len(answer.prompt_logprobs) != len(want.prompt) or len(answer.logprobs) != len(want.token_ids):
        return float("inf")
    places = [*zip(answer.prompt_logprobs[1:], want.prompt_logits_PV, strict=False)]
    places += zip(answer.logprobs, want.logits_TV, strict=True)
    return max(
        float((_values(found) - _chosen(found, logits_V)).abs().max() / logits_V.abs().max())
        for found, logits_V in places
        if found is not None
    )


def _half_precision(
    name: str, scored: Sequence[Answer], exact: Sequence[Expected], half: Sequence[Expected]
) -> Check:
    """At the prompts' positions, where all three read the same tokens."""
    ours, theirs = [], []
    for answer, want, rough in zip(scored, exact, half, strict=True):
        for place, found in enumerate(answer.prompt_logprobs[1:]):
            assert found is not None
            right = _chosen(found, want.prompt_logits_PV[place])
            ours.append(float((_values(found) - right).abs().mean()))
            theirs.append(float((_chosen(found, rough.prompt_logits_PV[place]) - right).abs().mean()))
    return within(
        f"{name}, bfloat16, log-probabilities",
        "mean error of the engine's bfloat16 against float32, over that of transformers' bfloat16",
        fmean(ours) / fmean(theirs),
        BFLOAT16_RATIO,
        mean_error=round(fmean(ours), 5),
        mean_error_of_transformers=round(fmean(theirs), 5),
    )


def _values(found: TokenLogprob) -> torch.Tensor:
    return torch.tensor([value for _, value in found.top], dtype=torch.float64)


def _chosen(found: TokenLogprob, logits_V: torch.Tensor) -> torch.Tensor:
    """The log-probabilities that transformers gives to the same tokens."""
    return torch.log_softmax(logits_V.double(), dim=-1)[[token for token, _ in found.top]]
