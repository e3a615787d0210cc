"""Logits of one shard of each of several checkpoints; run as a program, the process of a second shard."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from loraplex.engine.batch import BatchBuilder
from loraplex.kernels.reference import TorchKernels
from loraplex.model.collective import SOLO, Collective, connect
from loraplex.model.config import load_config
from loraplex.model.decoder import Decoder, KVCache
from loraplex.model.sharding import WHOLE, Shard
from loraplex.model.weights import load_weights
from loraplex.scheduling.plan import Chunk

BLOCK_SIZE = 8
PROMPT = [(37 * index + 11) % 250 for index in range(40)]
CUTS = (25, 13, 1, 1)
DTYPES = (torch.float32, torch.bfloat16)


def logits(
    folder: Path, dtype: torch.dtype, shard: Shard = WHOLE, collective: Collective = SOLO
) -> torch.Tensor:
    """Return the logits of every position of the prompt, computed in chunks."""
    config, kernels = load_config(folder), TorchKernels()
    local = shard.config(config)
    weights = load_weights(folder, config, dtype, shard=shard)
    decoder = Decoder(local, weights, kernels, 64, collective)
    caches = [KVCache.zeros(local.shape, 8, BLOCK_SIZE, dtype) for _ in weights.layers]
    builder, rows, start = BatchBuilder(kernels, BLOCK_SIZE), [], 0
    for length in CUTS:
        chunk = Chunk(
            request_id="r",
            adapter=None,
            start=start,
            token_ids=PROMPT[start : start + length],
            block_ids=list(range(8)),
            samples=True,
        )
        built = builder.build([chunk], {}, all_rows_of={"r"})
        rows.append(decoder.logits(decoder.forward(built.batch, caches)))
        start += length
    return torch.cat(rows)


def logits_of_all(folders: Sequence[Path], shard: Shard, rendezvous: Path) -> list[torch.Tensor]:
    """Return the logits of each folder, in both types."""
    collective = connect(shard, rendezvous, torch.device("cpu"))
    return [logits(folder, dtype, shard, collective) for folder in folders for dtype in DTYPES]


if __name__ == "__main__":
    rendezvous, out, *folders = map(Path, sys.argv[1:])
    torch.save(logits_of_all(folders, Shard(index=1, count=2), rendezvous), out)
