"""Numbers fetched from the host, against the host's own."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.triton.fetch import fetch, send


@pytest.mark.parametrize("count", [1, 1024, 2500])
def test_all_integers_arrive_and_nothing_beyond_them(count: int) -> None:
    torch.manual_seed(count)
    source = torch.randint(-(2**62), 2**62, (count,))
    memory = torch.full((count + 7,), -1)
    fetch(memory[:count], source)
    assert torch.equal(memory[:count], source)
    assert memory[count:].tolist() == [-1] * 7


def test_numbers_are_sent_in_the_other_direction_alike() -> None:
    source, host = torch.arange(2500).view(1250, 2), torch.full((1250, 2), -1)
    send(host, source)
    assert torch.equal(host, source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_types_arrive_too(dtype: torch.dtype) -> None:
    source = torch.arange(70).view(7, 10).to(dtype)
    target = torch.zeros(7, 10, dtype=dtype)
    fetch(target, source)
    assert torch.equal(target, source)
