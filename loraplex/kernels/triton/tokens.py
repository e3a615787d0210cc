"""Tokens that stay on the device: a step's input tokens, and the tokens it samples.

Every request has a *seat*, an index of `last_tokens` that holds the token it sampled last. A step reads the
tokens that the host does not know yet from there, so it can be launched before the host receives them.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-any-return,no-untyped-call,arg-type"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loraplex.kernels.triton.kernel import Kernel

_BLOCK_V = 4096
_ROWS = 256


# Tables are parts of one buffer, anywhere in it: do not specialise the kernel on their alignment.
@Kernel
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["token_ids", "follows", "seats"])
def _pick(token_ids, follows, seats, last_tokens, out, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    follow = tl.load(follows + rows, mask=mask, other=0) != 0
    seat = tl.load(seats + rows, mask=mask & follow, other=0)
    known = tl.load(token_ids + rows, mask=mask, other=0)
    sampled = tl.load(last_tokens + seat, mask=mask & follow, other=0)
    tl.store(out + rows, tl.where(follow, sampled, known), mask=mask)


def pick_tokens(
    token_ids_T: torch.Tensor, follows_T: torch.Tensor, seats_T: torch.Tensor, last_tokens: torch.Tensor
) -> torch.Tensor:
    """Return each row's token: the one given, or the last of its seat where the row follows."""
    out_T = torch.empty_like(token_ids_T)
    num_rows = token_ids_T.shape[0]
    _pick[(triton.cdiv(num_rows, _ROWS),)](
        token_ids_T, follows_T, seats_T, last_tokens, out_T, num_rows, BLOCK=_ROWS
    )
    return out_T


@Kernel
@triton.jit(do_not_specialize_on_alignment=["seats"])
def _greedy(logits, stride, seats, last_tokens, out, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.zeros((BLOCK,), tl.int32)
    bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        at = start + columns
        mask = at < vocab_size
        values = tl.load(logits + row.to(tl.int64) * stride + at, mask=mask, other=float("-inf")).to(
            tl.float32
        )
        bad |= (mask & ((values != values) | (tl.abs(values) == float("inf")))).to(tl.int32)
        best_at = tl.where(values > best, at, best_at)
        best = tl.maximum(best, values)
    peak = tl.max(best, axis=0)
    token = tl.min(tl.where(best == peak, best_at, vocab_size), axis=0)
    token = tl.minimum(token, vocab_size - 1)  # all NaN: any token will do, the row is marked
    tl.store(out + row * 2, token.to(tl.int64))
    tl.store(out + row * 2 + 1, (tl.max(bad, axis=0) == 0).to(tl.int64))
    tl.store(last_tokens + tl.load(seats + row), token.to(tl.int64))


def greedy_tokens(
    logits_LV: torch.Tensor, seats_L: torch.Tensor, last_tokens: torch.Tensor, out_L2: torch.Tensor
) -> None:
    """Write the likeliest token of each row to its seat and to `out`, with whether all its logits are finite.

    Of equally likely tokens the first is chosen, as in torch.
    """
    num_rows, vocab_size = logits_LV.shape
    _greedy[(num_rows,)](
        logits_LV, logits_LV.stride(0), seats_L, last_tokens, out_L2, vocab_size, BLOCK=_BLOCK_V
    )
