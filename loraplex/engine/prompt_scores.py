"""Log-probabilities of a prompt's own tokens (`prompt_logprobs`, `echo` with `logprobs`)."""

from __future__ import annotations

from typing import Final

import torch

from loraplex.core.request import TokenLogprob
from loraplex.engine.sampler import HostCopies, SamplingState, token_logprobs
from loraplex.model.decoder import Decoder
from loraplex.scheduling.plan import Chunk

_ROWS_AT_ONCE: Final = 128
"""Positions whose logits are held at once: 128 rows of a 150,000-word vocabulary are 75 MB."""


def wants_prompt_scores(state: SamplingState, chunk: Chunk) -> bool:
    # The last prompt position predicts the first output token, which is sampled, not scored.
    num_scored = len(state.prompt_token_ids) - 1
    return state.params.prompt_logprobs is not None and chunk.start < num_scored


def score_prompt(
    decoder: Decoder,
    state: SamplingState,
    chunk: Chunk,
    states_CH: torch.Tensor,
    copies: HostCopies | None = None,
) -> list[TokenLogprob]:
    """Return the scores of the prompt tokens that follow those of the chunk; `states_CH` are the chunk's.
    `copies`: see `token_logprobs`."""
    num_top = state.params.prompt_logprobs
    assert num_top is not None
    targets = state.prompt_token_ids[chunk.start + 1 : chunk.end + 1]
    scored: list[TokenLogprob] = []
    for first in range(0, len(targets), _ROWS_AT_ONCE):
        part = targets[first : first + _ROWS_AT_ONCE]
        logits_CV = decoder.logits(states_CH[first : first + len(part)])
        scored += token_logprobs(logits_CV, part, num_top, copies)
    return scored
