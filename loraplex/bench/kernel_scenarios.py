"""The scenarios of `loraplex bench kernels`: how close the decode LoRA kernels come to memory bandwidth; and
launches of rows that share adapters.

One layer's launch after the other over the weights of all layers, as in a step, captured in a graph; only the
bytes of the adapters' weights are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, Final

import numpy as np
import torch

from loraplex.bench.random_engine import random_specs
from loraplex.core.modules import GROUPS
from loraplex.engine.cuda.adapter_block import adapter_block
from loraplex.kernels.triton.lora_blocks import BlocksLaunch
from loraplex.kernels.triton.lora_rows import RowsLaunch
from loraplex.kernels.triton.lora_step import Launch, cut_tiles, new_step
from loraplex.model.shapes import config_of_shape

_GROUP = "qkv"
_REPLAYS = 20
_NUM_OUTPUTS = 4
_SHARED: Final[tuple[tuple[str, list[int], int, Launch], ...]] = (
    ("32 requests on one", [32], 64, BlocksLaunch.for_decode(32)),
    ("144 requests on 100", [2] * 44 + [1] * 56, 64, RowsLaunch.for_segments(144)),
    ("prompts, 2 x 128 tokens, on 2", [128] * 2, 64, BlocksLaunch.for_prompts(256)),
    ("prompts, 8 x 256 tokens, on 8", [256] * 8, 64, BlocksLaunch.for_prompts(2048)),
    ("256 requests on 120", [3] * 16 + [2] * 104, 64, RowsLaunch.for_segments(256)),
    ("256 requests on 132 of rank 16", [2] * 124 + [1] * 8, 16, RowsLaunch.for_segments(256)),
    ("256 requests on 256 of rank 16", [1] * 256, 16, RowsLaunch.for_segments(256)),
)
"""Name, rows of each adapter, their rank, and the launch that an engine chooses."""
_COPY_BYTES = 4 << 30


def measure_kernels(
    shape_name: str, num_adapters: Sequence[int], ranks: Sequence[int]
) -> tuple[float, list[dict[str, Any]]]:
    """Return the device's copy bandwidth in TB/s, and one row for each number of adapters and rank."""
    device = torch.device("cuda")
    return _copy_bandwidth(device), [
        _measure(shape_name, count, rank, device) for count in num_adapters for rank in ranks
    ]


def measure_shared(shape_name: str) -> list[dict[str, Any]]:
    """Return one row for each of some batches whose rows share adapters, on q, k and v."""
    found = []
    for name, rows_of, rank, launch in _SHARED:
        shrink_us, expand_us = _layer_us(shape_name, rows_of, rank, launch, torch.device("cuda"))
        found.append({"name": name, "shrink_us": round(shrink_us, 2), "expand_us": round(expand_us, 2)})
    return found


def _measure(shape_name: str, num_adapters: int, rank: int, device: torch.device) -> dict[str, Any]:
    """Measure a batch in which every adapter has one row, on q, k and v."""
    shape = config_of_shape(shape_name).shape
    launch = RowsLaunch.for_segments(num_adapters)
    shrink_us, expand_us = _layer_us(shape_name, [1] * num_adapters, rank, launch, device)
    shrink_bytes = num_adapters * rank * len(GROUPS[_GROUP]) * shape.hidden_size * 2
    expand_bytes = num_adapters * rank * sum(shape.out_features(module) for module in GROUPS[_GROUP]) * 2
    return {
        "adapters": num_adapters,
        "rank": rank,
        "shrink_mb": round(shrink_bytes / 1e6, 2),
        "shrink_us": round(shrink_us, 2),
        "shrink_tb_per_s": round(shrink_bytes / shrink_us / 1e6, 2),
        "expand_mb": round(expand_bytes / 1e6, 2),
        "expand_us": round(expand_us, 2),
        "expand_tb_per_s": round(expand_bytes / expand_us / 1e6, 2),
    }


def _layer_us(
    shape_name: str, rows_of: Sequence[int], rank: int, launch: Launch, device: torch.device
) -> tuple[float, float]:
    """Return the microseconds of both halves in one layer. `rows_of`: the rows of each adapter."""
    shape = config_of_shape(shape_name).shape
    spec = random_specs("kernel", shape_name, num_adapters=1, ranks=[rank], modules="q,k,v")[0]
    host = adapter_block(
        spec,
        shape,
        torch.bfloat16,
        read=lambda spec, layout, slab: slab.normal_(std=0.02),
        memory=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8),
    )
    blocks = [host.to(device) for _ in rows_of]
    starts = np.cumsum([0, *rows_of[:-1]])
    tiles_N2, tables_N = cut_tiles(
        np.stack((starts, np.array(rows_of)), axis=1),
        np.array([block.data_ptr() for block in blocks]),
        launch,
    )
    num_rows = sum(rows_of)
    step = new_step(
        shape,
        tiles_N2=torch.from_numpy(tiles_N2).to(device),
        tables_N=torch.from_numpy(tables_N).to(device),
        num_rows=num_rows,
        launch=launch,
        groups=frozenset({_GROUP}),
    )
    step.gather()
    out_features = sum(shape.out_features(module) for module in GROUPS[_GROUP])
    x = torch.randn(num_rows, shape.hidden_size, dtype=torch.bfloat16, device=device)
    # In turn, as no layer of a model writes where the one before it did.
    outputs = torch.zeros(_NUM_OUTPUTS, num_rows, out_features, dtype=torch.bfloat16, device=device)

    def shrink_all() -> None:
        for layer in range(shape.num_layers):
            step.shrink(x, layer, _GROUP)

    def expand_all() -> None:
        for layer in range(shape.num_layers):
            step.expand(outputs[layer % _NUM_OUTPUTS], shape.hidden_size, shape, layer, _GROUP)

    return graph_us(shrink_all) / shape.num_layers, graph_us(expand_all) / shape.num_layers


def graph_us(work: Callable[[], object]) -> float:
    """Return the median time of one replay, in microseconds. `work` should read many times the last-level
    cache."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(median(times))


def _copy_bandwidth(device: torch.device) -> float:
    """Return the TB/s of a kernel that reads and writes large arrays, counting the bytes of both."""
    source = torch.empty(_COPY_BYTES // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    return round(2 * _COPY_BYTES / graph_us(lambda: torch.neg(source, out=target)) / 1e6, 2)
