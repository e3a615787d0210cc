"""The scenarios of `loraplex bench kernels`: how close the decode LoRA kernels come to memory bandwidth.

One layer's launch after the other over the weights of all layers, as in a decode step, captured in a graph;
only the bytes of the adapters' weights are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from loraplex.bench.random_engine import random_specs
from loraplex.core.modules import GROUPS
from loraplex.engine.cuda.adapter_block import adapter_block
from loraplex.kernels.triton.lora_rows import RowsLaunch
from loraplex.kernels.triton.lora_step import new_step
from loraplex.model.shapes import config_of_shape

_GROUP = "qkv"
_REPLAYS = 20
_COPY_BYTES = 4 << 30


def measure_kernels(
    shape_name: str, num_adapters: Sequence[int], ranks: Sequence[int]
) -> tuple[float, list[dict[str, Any]]]:
    """Return the device's copy bandwidth in TB/s, and one row for each number of adapters and rank."""
    device = torch.device("cuda")
    return _copy_bandwidth(device), [
        _measure(shape_name, count, rank, device) for count in num_adapters for rank in ranks
    ]


def _measure(shape_name: str, num_adapters: int, rank: int, device: torch.device) -> dict[str, Any]:
    """Measure a batch in which every adapter has one row, on q, k and v."""
    shape = config_of_shape(shape_name).shape
    specs = random_specs("kernel", shape_name, num_adapters=num_adapters, ranks=[rank], modules="q,k,v")
    host = adapter_block(
        specs[0],
        shape,
        torch.bfloat16,
        read=lambda spec, layout, slab: slab.normal_(std=0.02),
        memory=lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8),
    )
    blocks = [host.to(device) for _ in specs]
    rows = torch.arange(num_adapters, device=device)
    step = new_step(
        shape,
        tiles_N2=torch.stack((rows, torch.ones_like(rows)), dim=1),
        tables_N=torch.tensor([block.data_ptr() for block in blocks], device=device),
        num_rows=num_adapters,
        launch=RowsLaunch.for_segments(num_adapters),
        groups=frozenset({_GROUP}),
    )
    step.gather()
    x = torch.randn(num_adapters, shape.hidden_size, dtype=torch.bfloat16, device=device)
    out_features = sum(shape.out_features(module) for module in GROUPS[_GROUP])
    y = torch.zeros(num_adapters, out_features, dtype=torch.bfloat16, device=device)
    in_features = shape.hidden_size

    def shrink_all() -> None:
        for layer in range(shape.num_layers):
            step.shrink(x, layer, _GROUP)

    def expand_all() -> None:
        for layer in range(shape.num_layers):
            step.expand(y, in_features, shape, layer, _GROUP)

    shrink_us, expand_us = (graph_us(work) / shape.num_layers for work in (shrink_all, expand_all))
    shrink_bytes = num_adapters * rank * len(GROUPS[_GROUP]) * in_features * 2
    expand_bytes = num_adapters * rank * out_features * 2
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
