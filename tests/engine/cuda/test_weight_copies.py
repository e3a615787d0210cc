"""Weights come to the device as they are in the file, whatever their type, shape and place in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import pytest
import torch

from loraplex.core.errors import ModelError
from loraplex.engine.cuda.weight_copies import WeightCopies
from loraplex.model.weights import StoredTensor

CPU = torch.device("cpu")
CHUNK_BYTES = 1 << 10
WHOLE = torch.randn(101, 64, generator=torch.Generator().manual_seed(0))
OFFSET = 24


@pytest.fixture
def file(tmp_path: Path) -> Iterator[FileIO]:
    with FileIO(tmp_path / "weights", "w+") as opened:
        yield opened


def store(values: torch.Tensor, file: FileIO, offset: int = OFFSET) -> StoredTensor:
    """In a file, as far as the values can be one stretch of it."""
    if not values.is_contiguous():
        return StoredTensor(values=values, file=file.fileno(), offset=None)
    os.pwrite(file.fileno(), values.view(torch.uint8).numpy().tobytes(), offset)
    return StoredTensor(values=values, file=file.fileno(), offset=offset)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "part",
    [WHOLE, WHOLE[:3], WHOLE[7:90], WHOLE[:, 16:48], WHOLE[5], WHOLE[:, 5]],
    ids=["whole", "one chunk", "rows", "columns", "a vector", "a strided vector"],
)
def test_a_tensor_arrives_whole_and_in_the_type_asked_for(
    file: FileIO, dtype: torch.dtype, file_dtype: torch.dtype, part: torch.Tensor
) -> None:
    source = WHOLE.to(file_dtype).as_strided(part.shape, part.stride(), part.storage_offset())
    copied = WeightCopies(CPU, dtype, CHUNK_BYTES)(store(source, file))
    assert copied.dtype == dtype
    assert torch.equal(copied, source.to(dtype))
    assert copied.data_ptr() != source.data_ptr(), "a mapped file may be replaced"


def test_threads_do_not_mix_their_chunks(file: FileIO) -> None:
    copies = WeightCopies(CPU, torch.bfloat16, CHUNK_BYTES)
    sources = [torch.full((200, 32), float(number)).to(torch.bfloat16) for number in range(40)]
    stored = [store(source, file, number * 200 * 32 * 2) for number, source in enumerate(sources)]
    with ThreadPoolExecutor(4) as threads:
        for source, copied in zip(sources, threads.map(copies, stored), strict=True):
            assert torch.equal(copied, source)


def test_a_file_that_was_cut_short_is_said_so(file: FileIO) -> None:
    stored = store(WHOLE, file)
    os.ftruncate(file.fileno(), OFFSET + 5000)
    with pytest.raises(ModelError, match="cut short while it was read; download it again"):
        WeightCopies(CPU, torch.float32, CHUNK_BYTES)(stored)
