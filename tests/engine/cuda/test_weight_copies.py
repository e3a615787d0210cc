"""Weights come to the device as they are in the file, whatever their type, shape and place in it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from loraplex.engine.cuda.weight_copies import WeightCopies

CPU = torch.device("cpu")
CHUNK_BYTES = 1 << 10
WHOLE = torch.randn(101, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("file_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "part",
    [WHOLE, WHOLE[:3], WHOLE[7:90], WHOLE[:, 16:48], WHOLE[5], WHOLE[:, 5]],
    ids=["whole", "one chunk", "rows", "columns", "a vector", "a strided vector"],
)
def test_a_tensor_arrives_whole_and_in_the_type_asked_for(
    dtype: torch.dtype, file_dtype: torch.dtype, part: torch.Tensor
) -> None:
    source = part.to(file_dtype)
    copied = WeightCopies(CPU, dtype, CHUNK_BYTES)(source)
    assert copied.dtype == dtype
    assert torch.equal(copied, source.to(dtype))
    assert copied.data_ptr() != source.data_ptr(), "a mapped file may be replaced"


def test_threads_do_not_mix_their_chunks() -> None:
    copies = WeightCopies(CPU, torch.bfloat16, CHUNK_BYTES)
    sources = [torch.full((200, 32), float(number)).to(torch.bfloat16) for number in range(40)]
    with ThreadPoolExecutor(4) as threads:
        for source, copied in zip(sources, threads.map(copies, sources), strict=True):
            assert torch.equal(copied, source)
