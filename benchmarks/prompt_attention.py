"""Attention of a prompt's rows over its context: ours beside torch's FlashAttention, cuDNN's through torch,
and vLLM's FlashAttention and FlashInfer where they are installed.

Ours, vLLM's and FlashInfer's read cached keys and values from pages; torch's takes contiguous ones, which an
engine would have to gather first, and that is not counted. A section of `benchmarks.gpu_engine`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from loraplex.bench.kernel_scenarios import graph_us
from loraplex.core.shape import ModelShape
from loraplex.kernels.triton.prefill_attention import prefill_attention
from loraplex.model.shapes import config_of_shape

ROWS_AND_CONTEXTS: Final = ((512, 512), (2048, 2048), (2048, 4096), (2048, 8000))
_BLOCK_SIZE: Final = 16
_LAUNCHES: Final = 10
_WORKSPACE_BYTES: Final = 256 << 20
_VLLM: Final = "vllm.vllm_flash_attn"

Launch = Callable[[], object]


def measure_prompts(shape_names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the microseconds of one layer; None for a kernel that is not available or does not take a
    shape."""
    found = []
    for name in shape_names:
        shape = config_of_shape(name).shape
        for num_rows, context in ROWS_AND_CONTEXTS:
            row: dict[str, Any] = {"shape": name, "rows": num_rows, "context": context}
            for who, make in _KERNELS.items():
                row[f"{who}_us"] = _layer_us(make, shape, num_rows, context)
            print(row, flush=True)
            found.append(row)
    return found


def _layer_us(
    make: Callable[[ModelShape, int, int], Launch], shape: ModelShape, num_rows: int, context: int
) -> float | None:
    try:
        launch = make(shape, num_rows, context)
        microseconds = graph_us(lambda: [launch() for _ in range(_LAUNCHES)])
    except (ImportError, RuntimeError) as error:
        print(f"{make.__name__}: {error}", flush=True)
        return None
    return round(microseconds / _LAUNCHES, 1)


def _random(*size: int) -> torch.Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device="cuda")


def _ours(shape: ModelShape, num_rows: int, context: int) -> Launch:
    num_blocks = -(-context // _BLOCK_SIZE)
    k_cache, v_cache = _random(2, num_blocks, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
    qkv_TO, out_TO = _random(num_rows, shape.q_size + 2 * shape.kv_size), _random(num_rows, shape.q_size)
    starts, lens, contexts = torch.tensor([[0], [num_rows], [context]], device="cuda")
    blocks = torch.randperm(num_blocks, device="cuda")[None]
    return lambda: prefill_attention(
        qkv_TO, starts, lens, contexts, blocks, k_cache, v_cache, out_TO, num_rows
    )


def _flash(shape: ModelShape, num_rows: int, context: int) -> Launch:
    return _of_torch(shape, num_rows, context, SDPBackend.FLASH_ATTENTION)


def _cudnn(shape: ModelShape, num_rows: int, context: int) -> Launch:
    return _of_torch(shape, num_rows, context, SDPBackend.CUDNN_ATTENTION)


def _of_torch(shape: ModelShape, num_rows: int, context: int, backend: SDPBackend) -> Launch:
    q = _random(1, num_rows, shape.num_heads, shape.head_dim).transpose(1, 2)
    k, v = _random(2, 1, context, shape.num_kv_heads, shape.head_dim).transpose(2, 3)
    mask = None if num_rows == context else causal_lower_right(num_rows, context)

    def launch() -> object:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=shape.num_heads != shape.num_kv_heads,
            )

    return launch


def _vllm(shape: ModelShape, num_rows: int, context: int) -> Launch:
    attend = importlib.import_module(_VLLM).flash_attn_varlen_func
    num_blocks = -(-context // _BLOCK_SIZE)
    k_cache, v_cache = _random(2, num_blocks, _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
    q = _random(num_rows, shape.num_heads, shape.head_dim)
    out = torch.empty_like(q)
    ends = torch.tensor([0, num_rows], dtype=torch.int32, device="cuda")
    used = torch.tensor([context], dtype=torch.int32, device="cuda")
    blocks = torch.randperm(num_blocks, device="cuda", dtype=torch.int32)[None]
    return lambda: attend(
        q=q,
        k=k_cache,
        v=v_cache,
        out=out,
        cu_seqlens_q=ends,
        max_seqlen_q=num_rows,
        seqused_k=used,
        max_seqlen_k=context,
        causal=True,
        block_table=blocks,
        fa_version=3,
    )


def _flashinfer(shape: ModelShape, num_rows: int, context: int) -> Launch:
    wrapper_class = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = wrapper_class(workspace, "HND", backend="auto")
    num_blocks = -(-context // _BLOCK_SIZE)

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    wrapper.plan(
        integers(0, num_rows),
        integers(0, num_blocks),
        torch.randperm(num_blocks, device="cuda", dtype=torch.int32),
        integers((context - 1) % _BLOCK_SIZE + 1),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        _BLOCK_SIZE,
        causal=True,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    cache = _random(num_blocks, 2, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
    q = _random(num_rows, shape.num_heads, shape.head_dim)
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, cache, out=out)


_KERNELS: Final[dict[str, Callable[[ModelShape, int, int], Launch]]] = {
    "ours": _ours,
    "flash": _flash,
    "cudnn": _cudnn,
    "vllm": _vllm,
    "flashinfer": _flashinfer,
}
