"""Draws tokens on the device for requests that need only the logits for it.

The order is that of `engine.sampler`: temperature, min_p, top_k, top_p, one draw that depends only on the
request's seed and the token's index (`engine.draws`). Penalties, biases, bad words and log-probabilities need
the request's history or its logits on the host, and are left to `engine.sampler`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from loraplex.core.request import EngineRequest
from loraplex.core.sampling import SamplingParams
from loraplex.engine.cuda.small_copies import SmallCopies
from loraplex.engine.draws import gumbel_noise, noise_key
from loraplex.engine.sampler import SamplingState


def stays_on_device(state: SamplingState) -> bool:
    """Return whether the next token can be chosen without the host."""
    params = state.params
    return (
        params.logprobs is None
        and not params.has_penalties
        and not params.logit_bias
        and not params.bad_word_ids
        and state.num_output >= params.min_tokens
    )


def draw_tokens(
    logits_LV: torch.Tensor, states: Sequence[SamplingState], copies: SmallCopies
) -> torch.Tensor:
    """Draw one token for each row; not for greedy requests."""
    controls = torch.tensor(
        [
            (p.temperature, p.min_p, p.top_k or logits_LV.shape[1], p.top_p, *noise_key(s.seed, s.num_output))
            for s in states
            for p in (s.params,)
        ],
        dtype=torch.float64,
    )
    temperature, min_p, top_k, top_p, *keys = copies.to_device(controls)[:, :, None].unbind(dim=1)
    key = tuple(each.to(torch.int32) for each in keys)  # exact: float64 holds 32 bits
    scaled_LV = logits_LV.float() / temperature.float()
    floor = scaled_LV.amax(dim=-1, keepdim=True) + min_p.log().float()  # min_p 0: minus infinity
    scaled_LV = scaled_LV.masked_fill(scaled_LV < floor, -torch.inf)
    numbers_V = torch.arange(scaled_LV.shape[1], device=scaled_LV.device)
    if all(state.params.top_k == 0 and state.params.top_p == 1.0 for state in states):
        return gumbel_noise(numbers_V, *key).add_(scaled_LV).argmax(dim=-1)
    values_LV, ids_LV = scaled_LV.sort(dim=-1, descending=True)
    weights_LV = values_LV.masked_fill(numbers_V >= top_k, -torch.inf).softmax(dim=-1).double()
    # Keep the shortest prefix that reaches top_p: a token stays if those before it fall short.
    before_LV = weights_LV.cumsum(dim=-1) - weights_LV
    is_left_LV = ((before_LV < top_p) | (top_p == 1.0)) & (numbers_V < top_k)
    values_LV = values_LV.masked_fill(~is_left_LV, -torch.inf)
    best_L = gumbel_noise(ids_LV, *key).add_(values_LV).argmax(dim=-1, keepdim=True)
    return ids_LV.gather(1, best_L)[:, 0]


def draw_once(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Draw tokens and discard them: the device loads each kernel at its first use, which must not happen in
    the step of a request."""
    copies = SmallCopies(device)
    for num_rows, top_p in itertools.product((1, 2), (0.9, 1.0)):
        params = SamplingParams(temperature=1.0, top_p=top_p, max_tokens=1)
        state = SamplingState(EngineRequest(request_id="", prompt_token_ids=[0], params=params))
        rows_L = torch.arange(num_rows, device=device)
        logits_LV = torch.zeros(num_rows, vocab_size, dtype=dtype, device=device)[rows_L]
        tokens_L = draw_tokens(logits_LV, [state] * num_rows, copies)
        tokens_L = torch.zeros_like(tokens_L).index_copy_(0, rows_L, tokens_L)[rows_L]
        for found in (tokens_L, logits_LV):
            copies.to_host_now(found)
