"""Attention of requests that decode, by the order in which they are handed to it.

Contexts are spread as in serving; the same ones in the order in which requests came, and longest first.
A section of `benchmarks.gpu_engine`.
"""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import fmean
from typing import Any, Final

import torch

from loraplex.bench.kernel_scenarios import graph_us
from loraplex.core.shape import ModelShape
from loraplex.kernels.triton.decode_attention import DecodeScratch, choose_num_splits, decode_attention
from loraplex.model.shapes import config_of_shape

NUM_REQUESTS: Final = (8, 16, 32, 64, 128, 256)
_MEDIAN_TOKENS: Final = 200
_SPREAD: Final = 0.8
_LONGEST: Final = 2000
_BLOCK_SIZE: Final = 16
_DRAWS: Final = 3
_LAUNCHES: Final = 8


def measure_order(shape_name: str) -> list[dict[str, Any]]:
    """Microseconds of one layer, the mean of a few draws of contexts."""
    found, shape = [], config_of_shape(shape_name).shape
    for num_requests in NUM_REQUESTS:
        took_us: dict[str, list[float]] = {"as_they_came_us": [], "longest_first_us": []}
        read_bytes = []
        for draw in range(_DRAWS):
            random = Random(draw)
            contexts = [
                min(max(round(_MEDIAN_TOKENS * random.lognormvariate(0.0, _SPREAD)), 1), _LONGEST)
                for _ in range(num_requests)
            ]
            read_bytes.append(sum(contexts) * shape.kv_size * 2 * 2)
            took_us["as_they_came_us"].append(_layer_us(shape, contexts))
            took_us["longest_first_us"].append(_layer_us(shape, sorted(contexts, reverse=True)))
        row = {"requests": num_requests, **{name: round(fmean(each), 1) for name, each in took_us.items()}}
        row["longest_first_tb_per_s"] = round(fmean(read_bytes) / row["longest_first_us"] / 1e6, 2)
        print(row, flush=True)
        found.append(row)
    return found


def _layer_us(shape: ModelShape, contexts: list[int]) -> float:
    device = torch.device("cuda")
    num_blocks_of = [-(-context // _BLOCK_SIZE) for context in contexts]
    num_blocks, num_rows = sum(num_blocks_of), len(contexts)
    caches = torch.randn(
        num_blocks, 2, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim, dtype=torch.bfloat16, device=device
    )
    tables = torch.zeros(num_rows, max(num_blocks_of), dtype=torch.int64)
    anywhere = iter(torch.randperm(num_blocks).tolist())
    for row, number in enumerate(num_blocks_of):
        tables[row, :number] = torch.tensor([*islice(anywhere, number)])
    qkv = torch.randn(num_rows, shape.q_size + 2 * shape.kv_size, dtype=torch.bfloat16, device=device)
    out = torch.empty(num_rows, shape.q_size, dtype=torch.bfloat16, device=device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    scratch = DecodeScratch.empty(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_sms=num_sms,
        device=device,
    )
    on_device = (torch.arange(num_rows, device=device), torch.tensor(contexts, device=device))
    tables_on_device = tables.to(device)

    def launches() -> None:
        for _ in range(_LAUNCHES):
            decode_attention(
                qkv,
                *on_device,
                tables_on_device,
                caches[:, 0],
                caches[:, 1],
                out,
                choose_num_splits(num_rows, shape.num_kv_heads, num_sms),
                scratch,
            )

    return graph_us(launches) / _LAUNCHES
