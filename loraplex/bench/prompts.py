"""Seeded random prompts, turned into requests before timing starts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from loraplex.bench.client import BenchRequest, encode_request
from loraplex.workload.jsonl import WorkloadRequest

# Ids below this are special tokens in most vocabularies.
FIRST_PLAIN_TOKEN_ID = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSource:
    """Draws prompts of token ids from [vocab_low, vocab_high); equal seeds give equal prompts."""

    seed: int
    vocab_low: int = FIRST_PLAIN_TOKEN_ID
    vocab_high: int = 4096

    def __post_init__(self) -> None:
        assert 0 <= self.vocab_low < self.vocab_high

    def draw(self, lengths: Sequence[int]) -> list[list[int]]:
        rng = random.Random(self.seed)
        ids = range(self.vocab_low, self.vocab_high)
        return [rng.choices(ids, k=length) for length in lengths]


def uniform_requests(
    source: PromptSource,
    *,
    num_requests: int,
    prompt_tokens: int,
    output_tokens: int,
    models: Sequence[str],
) -> list[BenchRequest]:
    """Return requests of one length, with the models in turn."""
    prompts = source.draw([prompt_tokens] * num_requests)
    return [
        encode_request(
            model=models[index % len(models)], prompt_token_ids=prompt, output_tokens=output_tokens
        )
        for index, prompt in enumerate(prompts)
    ]


def workload_requests(
    source: PromptSource, *, workload: Sequence[WorkloadRequest], models: Sequence[str]
) -> list[BenchRequest]:
    """Return the requests of a workload; adapter indices are taken modulo the number of models."""
    prompts = source.draw([request.prompt_tokens for request in workload])
    return [
        encode_request(
            model=models[request.adapter % len(models)],
            prompt_token_ids=prompt,
            output_tokens=request.output_tokens,
        )
        for request, prompt in zip(workload, prompts, strict=True)
    ]
