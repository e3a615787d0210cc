"""Every family against transformers: the same logits at every position, however the prompt is cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, save_model

from loraplex.engine.batch import BatchBuilder
from loraplex.kernels.cpu.numba_kernels import NumbaKernels
from loraplex.kernels.interface import Kernels
from loraplex.kernels.reference import TorchKernels
from loraplex.model.config import ModelConfig, load_config
from loraplex.model.decoder import Decoder, KVCache
from loraplex.model.weights import load_weights
from loraplex.scheduling.plan import Chunk

BLOCK_SIZE = 8
NUM_BLOCKS = 40
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # exact first: later ones round the weights
PROMPT = [(37 * index + 11) % 256 for index in range(150)]
# Whole prompt; uneven chunks; a cut inside a block; then one token at a time, as decode does.
CUTS = {
    "one chunk": [150],
    "uneven chunks": [70, 64, 16],
    "inside blocks": [13, 1, 50, 86],
    "chunks then decode": [100, 25] + [1] * 25,
}


def kernels_for(kind: str, config: ModelConfig) -> Kernels:
    return NumbaKernels(config.shape.head_dim) if kind == "numba" else TorchKernels()


def logits_by_chunks(folder: Path, kind: str, cuts: list[int], dtype: torch.dtype) -> torch.Tensor:
    config = load_config(folder)
    kernels = kernels_for(kind, config)
    decoder = Decoder(config, load_weights(folder, config, dtype), kernels, max_model_len=512)
    caches = [
        KVCache.zeros(config.shape, NUM_BLOCKS, BLOCK_SIZE, dtype) for _ in range(config.shape.num_layers)
    ]
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()
    builder, rows, start = BatchBuilder(kernels, BLOCK_SIZE), [], 0
    for length in cuts:
        chunk = Chunk(
            request_id="r",
            adapter=None,
            start=start,
            token_ids=PROMPT[start : start + length],
            block_ids=blocks[: -(-(start + length) // BLOCK_SIZE)],
            samples=True,
        )
        built = builder.build([chunk], {}, all_rows_of={"r"})
        rows.append(decoder.logits(decoder.forward(built.batch, caches)))
        start += length
    return torch.cat(rows)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param)
    model = save_model(folder, request.param)
    with torch.no_grad():
        expected = {dtype: model.to(dtype)(torch.tensor([PROMPT])).logits[0].float() for dtype in DTYPES}
    return folder, expected


@pytest.mark.parametrize("kind", ["numba", "torch"])
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS.keys())
def test_float32_logits_equal_transformers(checkpoint, kind: str, cuts: list[int]) -> None:
    folder, expected = checkpoint
    found = logits_by_chunks(folder, kind, cuts, torch.float32)
    assert relative_error(found, expected[torch.float32]).max() < 2e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_no_worse_than_transformers(checkpoint, dtype: torch.dtype) -> None:
    folder, expected = checkpoint
    exact = expected[torch.float32]
    found = logits_by_chunks(folder, "torch", CUTS["uneven chunks"], dtype).float()
    assert relative_error(found, exact).mean() < 1.3 * relative_error(expected[dtype], exact).mean()


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)
