"""Block tables that are kept from step to step say what tables made anew would."""

from __future__ import annotations

import random

import pytest
import torch

from loraplex.engine.batch import BatchBuilder
from loraplex.kernels.reference import TorchKernels
from loraplex.scheduling.plan import Chunk

BLOCK_SIZE = 4


def decode(request_id: str, blocks: list[int]) -> Chunk:
    """The last token that there is room for."""
    start = len(blocks) * BLOCK_SIZE - 1
    return Chunk(
        request_id=request_id, adapter=None, start=start, token_ids=[1], block_ids=blocks, samples=True
    )


def tensors(builder: BatchBuilder, chunks: list[Chunk]) -> dict[str, list[object]]:
    batch = builder.build(chunks, {}).batch
    return {name: value.tolist() for name, value in vars_of(batch).items()}


def vars_of(batch: object) -> dict[str, torch.Tensor]:
    found = {name: getattr(batch, name) for name in type(batch).__dataclass_fields__}  # type: ignore[attr-defined]
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("seed", range(20))
def test_kept_tables_are_those_of_a_builder_that_knows_nothing(seed: int) -> None:
    rng = random.Random(seed)
    builder = BatchBuilder(TorchKernels(), BLOCK_SIZE)
    blocks_of: dict[str, list[int]] = {}
    for _ in range(150):
        event = rng.choice(["begin", "grow", "grow", "grow", "preempt", "end", "move"])
        name = rng.choice(sorted(blocks_of)) if blocks_of else None
        if event == "begin":
            # Ids come back, and more requests come than there are rows at first.
            blocks_of[f"r{rng.randrange(60)}"] = [rng.randrange(900) for _ in range(rng.randint(1, 40))]
        elif event == "grow" and name is not None:
            blocks_of[name] += [rng.randrange(900) for _ in range(rng.randint(1, 3))]
        elif event == "preempt" and name is not None:  # another list takes its place
            blocks_of[name] = [rng.randrange(900)]
        elif event == "end" and name is not None:
            del blocks_of[name]
            builder.tables.forget(name)
        elif event == "move":
            for blocks in blocks_of.values():
                blocks[:] = [block + 1000 if block % 3 == 0 else block for block in blocks]
            builder.tables.forget_contents()
        builder.tables.check_integrity(blocks_of.keys())
        running = rng.sample(sorted(blocks_of), k=rng.randint(0, len(blocks_of)))
        chunks = [decode(each, blocks_of[each]) for each in running]
        if chunks:
            assert tensors(builder, chunks) == tensors(BatchBuilder(TorchKernels(), BLOCK_SIZE), chunks)


class CountedList(list[int]):
    """Counts the numbers that are read from it."""

    num_read = 0

    def __getitem__(self, key):  # type: ignore[no-untyped-def]
        found = super().__getitem__(key)
        CountedList.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self):  # type: ignore[no-untyped-def]
        CountedList.num_read += len(self)
        return super().__iter__()


def test_a_step_reads_only_the_blocks_that_are_new() -> None:
    builder = BatchBuilder(TorchKernels(), BLOCK_SIZE)
    blocks_of = {f"r{number}": CountedList(range(number, number + 2000)) for number in range(8)}
    builder.build([decode(name, blocks) for name, blocks in blocks_of.items()], {})
    CountedList.num_read = 0
    blocks_of["r3"].append(7)
    batch = builder.build([decode(name, blocks) for name, blocks in blocks_of.items()], {}).batch
    assert CountedList.num_read == 1
    assert batch.decode_blocks_DB.shape == (8, 2001)
    assert batch.decode_blocks_DB[0].tolist() == [*range(3, 2003), 7], "the longest comes first"


def test_rows_of_requests_that_ended_are_used_again() -> None:
    builder = BatchBuilder(TorchKernels(), BLOCK_SIZE)
    for number in range(1000):
        builder.build([decode(f"r{number}", [number, number + 1])], {})
        builder.tables.forget(f"r{number}")
    builder.tables.check_integrity(frozenset())
    assert builder.tables.num_rows < 100
