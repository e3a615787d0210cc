"""Decoding rows share reads of an adapter's weights where that pays."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loraplex.engine.cuda.step_lora import split_segments
from loraplex.engine.cuda.step_sizes import MIXED_DECODES, mixed_sizes
from loraplex.kernels.triton.triton_kernels import StepSegments


def batch_of(rows_and_ranks: list[tuple[int, int]], num_decodes: int | None = None) -> SimpleNamespace:
    """Return what `split_segments` reads of a batch, with a segment of so many rows and such a rank each."""
    lengths = np.array([rows for rows, _ in rows_and_ranks])
    starts = np.cumsum(lengths) - lengths
    num_rows = int(lengths.sum())
    return SimpleNamespace(
        token_ids_T=torch.zeros(num_rows),
        decode_rows_D=torch.zeros(num_rows if num_decodes is None else num_decodes),
        lora=StepSegments(
            spans_N2=np.stack((starts, lengths), axis=1),
            tables_N=np.arange(len(lengths)),
            ranks_N=np.array([rank for _, rank in rows_and_ranks]),
            groups=frozenset({"qkv"}),
        ),
    )


@pytest.mark.parametrize(
    ("rows_and_ranks", "shares"),
    [
        ([(1, 64), (1, 64)], False),
        ([(3, 64), (3, 64)], True),
        ([(2, 64), (2, 64)], False),
        ([(2, 256), (2, 256)], True),
        ([(4, 8), (4, 8)], False),
        ([(12, 8), (12, 8)], True),
        # One large adapter beside many small ones does not make sharing these worth it.
        ([(1, 256), *[(3, 8)] * 20], False),
        # Nor does a small one beside large ones make it worthless.
        ([(1, 8), *[(4, 128)] * 20], True),
    ],
)
def test_rows_share_where_enough_is_read(rows_and_ranks: list[tuple[int, int]], shares: bool) -> None:
    assert split_segments(batch_of(rows_and_ranks)).shares is shares


def test_many_rows_on_one_adapter_join_the_tiles_of_prompts() -> None:
    lora = split_segments(batch_of([(8, 64), (100, 64), (200, 64)], num_decodes=108))
    assert not lora.shares
    assert len(lora.decode_tiles[1]) == 8
    assert lora.span_tiles[0].tolist() == [[8, 64], [72, 36], [108, 64], [172, 64], [236, 64], [300, 8]]


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40),
    st.lists(st.integers(2, 300), min_size=1, max_size=32),
)
def test_tiles_of_any_step_fit_its_graph(decodes: list[int], prompts: list[int]) -> None:
    decodes = [rows for index, rows in enumerate(decodes) if sum(decodes[: index + 1]) <= MIXED_DECODES[-1]]
    num_rows = sum(decodes) + sum(prompts)
    lora = split_segments(batch_of([(rows, 8) for rows in (*decodes, *prompts)], num_decodes=sum(decodes)))
    sizes = mixed_sizes(num_rows, sum(decodes), len(prompts), table_width=1, num_layers=1)
    assert len(lora.decode_tiles[1]) <= sizes.decode_tiles
    assert len(lora.span_tiles[1]) <= sizes.span_tiles
