"""Tokens that stay on the device, against plain torch."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.triton.tokens import greedy_tokens, pick_tokens


@pytest.mark.parametrize("num_rows", [1, 5, 300])
def test_rows_that_follow_start_from_their_seat(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    last_tokens = torch.randint(0, 100, (num_rows + 3,))
    token_ids, seats = torch.randint(100, 200, (num_rows,)), torch.randperm(num_rows + 3)[:num_rows]
    follows = torch.randint(0, 2, (num_rows,))
    expected = torch.where(follows.bool(), last_tokens[seats], token_ids)
    assert torch.equal(pick_tokens(token_ids, follows, seats, last_tokens), expected)


@pytest.mark.parametrize("vocab_size", [1, 17, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_likeliest_token_goes_to_its_seat_and_to_the_host(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size).to(dtype)
    last_tokens, out = torch.full((8,), -1), torch.full((3, 2), -1)
    greedy_tokens(logits, torch.tensor([5, 2, 7]), last_tokens, out)
    expected = logits.float().argmax(dim=-1)
    assert torch.equal(out[:, 0], expected)
    assert out[:, 1].tolist() == [1, 1, 1]
    assert torch.equal(last_tokens[torch.tensor([5, 2, 7])], expected)
    assert last_tokens[torch.tensor([0, 1, 3, 4, 6])].tolist() == [-1] * 5


def test_of_equal_logits_the_first_wins() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [4200, 77, 4999]] = 1.0
    out = torch.zeros(1, 2, dtype=torch.int64)
    greedy_tokens(logits, torch.tensor([0]), torch.zeros(1, dtype=torch.int64), out)
    assert out.tolist() == [[77, 1]]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_marked_and_the_others_are_not(bad: float) -> None:
    logits = torch.randn(3, 600)
    logits[1, 321] = bad
    last_tokens, out = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    greedy_tokens(logits, torch.arange(3), last_tokens, out)
    assert out[:, 1].tolist() == [1, 0, 1]
    assert 0 <= int(last_tokens[1]) < 600, "the next step must still find a token it can look up"
