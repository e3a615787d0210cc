"""Attention of requests that decode: ours beside vLLM's FlashAttention and FlashInfer, if they are installed.

All read keys and values from pages of 16 tokens, each launch those of another layer. A section of
`benchmarks.gpu_engine`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from random import Random
from statistics import fmean
from typing import Any, Final

import torch

from benchmarks.attention_order import draw_contexts, layer_us
from loraplex.bench.kernel_scenarios import graph_us
from loraplex.core.shape import ModelShape
from loraplex.model.shapes import config_of_shape

NUM_REQUESTS: Final = (32, 64, 128, 256)
_PAGE_SIZE: Final = 16
_NUM_LAYERS: Final = 8
_WORKSPACE_BYTES: Final = 256 << 20


def measure_decodes(shape_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the microseconds of one layer; None for a kernel that is not available."""
    found = []
    for name in shape_names:
        shape = config_of_shape(name).shape
        for num_requests in NUM_REQUESTS:
            contexts = sorted(draw_contexts(Random(0), num_requests), reverse=True)
            row: dict[str, Any] = {
                "shape": name,
                "requests": num_requests,
                "mean_context": round(fmean(contexts)),
                "ours_us": round(layer_us(shape, contexts), 1),
                "vllm_us": _peer_us(_vllm, shape, contexts),
                "flashinfer_us": _peer_us(_flashinfer, shape, contexts),
            }
            print(row, flush=True)
            found.append(row)
    return found


def _peer_us(
    measure: Callable[[ModelShape, list[int]], float], shape: ModelShape, contexts: list[int]
) -> float | None:
    try:
        return round(measure(shape, contexts), 1)
    except (ImportError, RuntimeError) as error:
        print(f"{measure.__name__}: {error}", flush=True)
        return None


def _vllm(shape: ModelShape, contexts: list[int]) -> float:
    attend = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func
    num_pages, widest = [-(-context // _PAGE_SIZE) for context in contexts], -(-max(contexts) // _PAGE_SIZE)
    caches = _random(_NUM_LAYERS, 2, sum(num_pages), _PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    pages = torch.split(torch.randperm(sum(num_pages), dtype=torch.int32), num_pages)
    table = torch.stack([torch.nn.functional.pad(each, (0, widest - len(each))) for each in pages]).cuda()
    q = _random(len(contexts), shape.num_heads, shape.head_dim)
    out = torch.empty_like(q)
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32, device="cuda")
    used = torch.tensor(contexts, dtype=torch.int32, device="cuda")

    def layers() -> None:
        for k_cache, v_cache in caches:
            attend(
                q=q,
                k=k_cache,
                v=v_cache,
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=1,
                seqused_k=used,
                max_seqlen_k=max(contexts),
                causal=True,
                block_table=table,
                fa_version=3,
            )

    return graph_us(layers) / _NUM_LAYERS


def _flashinfer(shape: ModelShape, contexts: list[int]) -> float:
    """Return the time of the faster of its two kernels, with and without tensor cores."""
    return min(_flashinfer_kernel(shape, contexts, has_tensor_cores) for has_tensor_cores in (False, True))


def _flashinfer_kernel(shape: ModelShape, contexts: list[int], has_tensor_cores: bool) -> float:
    wrapper_class = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = wrapper_class(workspace, "HND", use_tensor_cores=has_tensor_cores)
    num_pages = [-(-context // _PAGE_SIZE) for context in contexts]
    caches = _random(_NUM_LAYERS, sum(num_pages), 2, shape.num_kv_heads, _PAGE_SIZE, shape.head_dim)
    wrapper.plan(
        torch.tensor([0, *num_pages]).cumsum(0).int(),
        torch.randperm(sum(num_pages), dtype=torch.int32).cuda(),
        torch.tensor([(context - 1) % _PAGE_SIZE + 1 for context in contexts]).int(),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        _PAGE_SIZE,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    q = _random(len(contexts), shape.num_heads, shape.head_dim)
    out = torch.empty_like(q)

    def layers() -> None:
        for cache in caches:
            wrapper.run(q, cache, out=out)

    return graph_us(layers) / _NUM_LAYERS


def _random(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")
