"""When decoding rows share reads of an adapter's weights."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loraplex.engine.cuda.step_lora import split_segments
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


def test_rows_do_not_share_beside_prompts() -> None:
    assert not split_segments(batch_of([(8, 64), (100, 64)], num_decodes=8)).shares
