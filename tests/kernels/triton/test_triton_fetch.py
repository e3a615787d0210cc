"""Integers fetched from the host, against the host's own."""

from __future__ import annotations

import pytest
import torch

from loraplex.kernels.triton.fetch import fetch


@pytest.mark.parametrize("count", [1, 1024, 2500])
def test_all_integers_arrive_and_nothing_beyond_them(count: int) -> None:
    torch.manual_seed(count)
    source = torch.randint(-(2**62), 2**62, (count,))
    memory = torch.full((count + 7,), -1)
    fetch(memory[:count], source)
    assert torch.equal(memory[:count], source)
    assert memory[count:].tolist() == [-1] * 7
