"""Decode attention with its requests in order of arrival, and longest context first.

Contexts are spread as in serving, and equal in both orders. A section of `benchmarks.gpu_engine`.
"""

from __future__ import annotations

from itertools import islice
from random import Random
from statistics import fmean
from typing import Any, Final

import torch

from loraplex.bench.kernel_scenarios import graph_us
from loraplex.bench.step_cases import SPREAD
from loraplex.core.shape import ModelShape
from loraplex.kernels.triton.decode_attention import DecodeScratch, choose_num_splits, decode_attention
from loraplex.model.shapes import config_of_shape

NUM_REQUESTS: Final = (8, 16, 32, 64, 128, 256)
_MEDIAN_TOKENS: Final = 200
_LONGEST: Final = 2000
_BLOCK_SIZE: Final = 16
_DRAWS: Final = 3
_NUM_LAYERS: Final = 8


def measure_order(shape_name: str) -> list[dict[str, Any]]:
    """Return the microseconds of one layer, as means over a few draws of contexts."""
    found, shape = [], config_of_shape(shape_name).shape
    for num_requests in NUM_REQUESTS:
        drawn = [draw_contexts(Random(seed), num_requests) for seed in range(_DRAWS)]
        as_they_came_us = fmean(layer_us(shape, contexts) for contexts in drawn)
        longest_first_us = fmean(layer_us(shape, sorted(contexts, reverse=True)) for contexts in drawn)
        num_bytes = fmean(sum(contexts) for contexts in drawn) * 2 * shape.kv_size * torch.bfloat16.itemsize
        row = {
            "requests": num_requests,
            "as_they_came_us": round(as_they_came_us, 1),
            "longest_first_us": round(longest_first_us, 1),
            "longest_first_tb_per_s": round(num_bytes / longest_first_us / 1e6, 2),
        }
        print(row, flush=True)
        found.append(row)
    return found


def draw_contexts(random: Random, number: int) -> list[int]:
    drawn = (round(_MEDIAN_TOKENS * random.lognormvariate(0.0, SPREAD)) for _ in range(number))
    return [min(max(each, 1), _LONGEST) for each in drawn]


def layer_us(shape: ModelShape, contexts: list[int]) -> float:
    """Time layers in a row, each with its own keys and values, so that none is in the last-level cache."""
    num_blocks_of = [-(-context // _BLOCK_SIZE) for context in contexts]
    num_blocks, num_rows = sum(num_blocks_of), len(contexts)
    anywhere = iter(torch.randperm(num_blocks).tolist())
    blocks_DB = torch.zeros(num_rows, max(num_blocks_of), dtype=torch.int64)
    for row, number in enumerate(num_blocks_of):
        blocks_DB[row, :number] = torch.tensor([*islice(anywhere, number)])

    device = torch.device("cuda")
    caches = torch.randn(
        *(_NUM_LAYERS, num_blocks, 2, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim),
        dtype=torch.bfloat16,
        device=device,
    )
    qkv_TO = torch.randn(num_rows, shape.q_size + 2 * shape.kv_size, dtype=torch.bfloat16, device=device)
    out_TO = torch.empty(num_rows, shape.q_size, dtype=torch.bfloat16, device=device)
    rows_D, contexts_D = torch.arange(num_rows, device=device), torch.tensor(contexts, device=device)
    blocks_DB = blocks_DB.to(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    num_splits = choose_num_splits(num_rows, shape.num_kv_heads, num_sms)
    scratch = DecodeScratch.empty(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_sms=num_sms,
        device=device,
    )

    def layers() -> None:
        for cache in caches:
            k_cache, v_cache = cache[:, 0], cache[:, 1]
            decode_attention(
                qkv_TO, rows_D, contexts_D, blocks_DB, k_cache, v_cache, out_TO, num_splits, scratch
            )

    return graph_us(layers) / _NUM_LAYERS
