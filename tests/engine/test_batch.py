"""The layout of a step: which rows stand where, and which of them are one segment."""

from __future__ import annotations

import pytest
import torch

from loraplex.engine.batch import BatchBuilder
from loraplex.kernels.lora import LoraSegment, LoraWeights
from loraplex.kernels.reference import TorchKernels
from loraplex.scheduling.plan import Chunk

ADAPTERS = {
    name: LoraWeights(groups=(), table_LM=torch.zeros(0), max_rank=1, touched=frozenset()) for name in "xy"
}


class DecodesFirst(TorchKernels):
    decodes_first = True


def chunk(request_id: str, adapter: str | None, num_tokens: int) -> Chunk:
    return Chunk(
        request_id=request_id,
        adapter=adapter,
        start=4,
        token_ids=list(range(num_tokens)),
        block_ids=[3, 1, 2],
        samples=True,
    )


STEP = [chunk("a", "x", 1), chunk("b", None, 3), chunk("c", "y", 2), chunk("d", "x", 4), chunk("e", "y", 1)]


@pytest.mark.parametrize(
    ("kernels", "order", "segments"),
    [
        (TorchKernels(), "badce", [("x", 3, 8), ("y", 8, 11)]),
        (DecodesFirst(), "aebdc", [("x", 0, 1), ("y", 1, 2), ("x", 5, 9), ("y", 9, 11)]),
    ],
    ids=["one segment for each adapter", "decodes first"],
)
def test_rows_of_an_adapter_stand_side_by_side(
    kernels: TorchKernels, order: str, segments: list[tuple[str, int, int]]
) -> None:
    built = BatchBuilder(kernels, block_size=4).build(STEP, ADAPTERS)
    assert "".join(c.request_id for c in built.chunks) == order
    found: list[LoraSegment] = built.batch.lora
    names = {id(weights): name for name, weights in ADAPTERS.items()}
    assert [(names[id(s.weights)], s.start, s.end) for s in found] == segments


def test_spans_and_decodes_are_told_apart() -> None:
    batch = BatchBuilder(DecodesFirst(), block_size=4).build(STEP, ADAPTERS).batch
    assert batch.decode_rows_D.tolist() == [0, 1]
    assert batch.decode_context_D.tolist() == [5, 5]
    assert batch.span_starts_S.tolist() == [2, 5, 9]
    assert batch.span_lens_S.tolist() == [3, 4, 2]
    assert batch.span_context_S.tolist() == [7, 8, 6]
    assert batch.max_span_len == 4


def test_decodes_with_long_contexts_begin_first() -> None:
    def decode(request_id: str, start: int) -> Chunk:
        blocks = list(range(start // 4 + 1))
        return Chunk(
            request_id=request_id, adapter=None, start=start, token_ids=[1], block_ids=blocks, samples=True
        )

    step = [decode("a", 2), decode("b", 9), decode("c", 5)]
    batch = BatchBuilder(TorchKernels(), block_size=4).build(step, {}).batch
    assert batch.decode_rows_D.tolist() == [1, 2, 0]
    assert batch.decode_context_D.tolist() == [10, 6, 3]
    assert batch.decode_blocks_DB.tolist() == [[0, 1, 2], [0, 1, 0], [0, 0, 0]]


def test_slots_follow_the_block_table() -> None:
    batch = BatchBuilder(TorchKernels(), block_size=4).build([chunk("a", None, 6)], {}).batch
    assert batch.positions_T.tolist() == [4, 5, 6, 7, 8, 9]
    assert batch.slots_T.tolist() == [4, 5, 6, 7, 8, 9]  # blocks 1 and 2 of four slots each


def test_a_chunk_that_follows_has_a_row_for_the_token_it_will_get() -> None:
    follower = Chunk(request_id="a", adapter=None, start=4, token_ids=[], block_ids=[0, 1], samples=True)
    batch = BatchBuilder(TorchKernels(), block_size=4).build([follower], {}).batch
    assert batch.token_ids_T.shape == (1,)
    assert batch.decode_context_D.tolist() == [5]
