"""Every kernel in plain torch: for any device and dtype, and the reference in tests of the compiled ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.interface import PackedLinear
from loraplex.kernels.lora import LoraSegment, LoraWeights, add_lora_segment, merged_weight


class TorchLinear:
    """A weight in its original layout."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.out_features = weight_OI.shape[0]
        self._weight_OI = weight_OI
        self._bias_O = bias_O

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TI, self._weight_OI, self._bias_O)

    def weight(self) -> torch.Tensor:
        return self._weight_OI

    def with_weight(self, weight_OI: torch.Tensor) -> TorchLinear:
        return TorchLinear(weight_OI, self._bias_O)


class TorchKernels:
    """`kernels.interface.Kernels` in plain torch."""

    decodes_first = False

    def pack_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> PackedLinear:
        return TorchLinear(weight_OI, bias_O)

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        # The norm is computed in float32 and rounded before the weight, as in the reference models.
        x32 = x_TH.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        return normed.to(x_TH.dtype) * weight_H

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        residual_TH.add_(x_TH)
        return self.rms_norm(residual_TH, weight_H, eps)

    def rope_and_cache(
        self,
        qkv_TO: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        batch: KernelBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        num_kv_heads, block_size, head_dim = v_cache.shape[1:]
        heads_TND = qkv_TO.view(qkv_TO.shape[0], -1, head_dim)
        num_rotated = heads_TND.shape[1] - num_kv_heads
        cos, sin = cos_sin_PD[batch.positions_T].to(qkv_TO.dtype)[:, None].chunk(2, dim=-1)
        first, second = heads_TND[:, :num_rotated].chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        heads_TND[:, :num_rotated] = rotated
        blocks, offsets = batch.slots_T // block_size, batch.slots_T % block_size
        k_cache[blocks, :, offsets] = heads_TND[:, num_rotated - num_kv_heads : num_rotated]
        v_cache[blocks, :, offsets] = heads_TND[:, num_rotated:]

    def attention(
        self, qkv_TO: torch.Tensor, batch: KernelBatch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        num_kv_heads, _, head_dim = v_cache.shape[1:]
        q_size = qkv_TO.shape[1] - 2 * num_kv_heads * head_dim
        out_TO = torch.empty(qkv_TO.shape[0], q_size, dtype=qkv_TO.dtype, device=qkv_TO.device)
        self._decode_attention(qkv_TO, batch, k_cache, v_cache, out_TO)
        spans = zip(
            batch.span_starts_S.tolist(),
            batch.span_lens_S.tolist(),
            batch.span_context_S.tolist(),
            batch.span_blocks_SB,
            strict=True,
        )
        for start, num_rows, context_len, block_ids in spans:
            span = _Span(start=start, end=start + num_rows, context_len=context_len, block_ids=block_ids)
            _attend(qkv_TO, span, k_cache, v_cache, out_TO)
        return out_TO

    def _decode_attention(
        self,
        qkv_TO: torch.Tensor,
        batch: KernelBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out_TO: torch.Tensor,
    ) -> None:
        rows = zip(
            batch.decode_rows_D.tolist(), batch.decode_context_D.tolist(), batch.decode_blocks_DB, strict=True
        )
        for row, context_len, block_ids in rows:
            span = _Span(start=row, end=row + 1, context_len=context_len, block_ids=block_ids)
            _attend(qkv_TO, span, k_cache, v_cache, out_TO)

    def silu_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_T2F.chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear(
        self, linear: PackedLinear, x_TI: torch.Tensor, batch: KernelBatch, layer: int, group: str
    ) -> torch.Tensor:
        y_TO = linear(x_TI)
        self.add_lora(y_TO, x_TI, batch, layer, group)
        return y_TO

    def prepare_lora(self, segments: Sequence[LoraSegment]) -> Any:
        return segments

    @property
    def why_not_merged(self) -> str | None:
        return None

    def merge_linear(
        self,
        linear: PackedLinear,
        layer: int,
        group: str,
        weights: LoraWeights,
        into_OI: torch.Tensor | None = None,
    ) -> PackedLinear:
        lora_group = weights.groups[layer].get(group)
        return linear.with_weight(merged_weight(linear.weight(), lora_group, into_OI))

    def add_lora(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, batch: KernelBatch, layer: int, group: str
    ) -> None:
        for segment in batch.lora:
            lora_group = segment.weights.groups[layer].get(group)
            if lora_group is not None:
                add_lora_segment(y_TO, x_TI, segment, lora_group)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Span:
    """Rows [start, end) of one sequence, and its context."""

    start: int
    end: int
    context_len: int
    block_ids: torch.Tensor


def _attend(
    qkv_TO: torch.Tensor,
    span: _Span,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out_TO: torch.Tensor,
) -> None:
    """Compute the attention of one sequence's new rows over its whole context."""
    num_kv_heads, block_size, head_dim = v_cache.shape[1:]
    num_new = span.end - span.start
    q_NQD = qkv_TO[span.start : span.end, : out_TO.shape[1]].view(num_new, -1, head_dim).transpose(0, 1)
    if span.context_len == num_new:
        # Nothing is cached before: the rows themselves are the context, and no pages need gathering.
        kv = qkv_TO[span.start : span.end, out_TO.shape[1] :].view(num_new, 2, num_kv_heads, head_dim)
        k_NLD, v_NLD = kv[:, 0].transpose(0, 1), kv[:, 1].transpose(0, 1)
    else:
        blocks = span.block_ids[: -(-span.context_len // block_size)]
        k_NLD = k_cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, : span.context_len]
        v_NLD = v_cache[blocks].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, : span.context_len]
    mask = None
    if 1 < num_new < span.context_len:
        query_positions = torch.arange(span.context_len - num_new, span.context_len, device=qkv_TO.device)
        mask = torch.arange(span.context_len, device=qkv_TO.device) <= query_positions[:, None]
    out_NQD = F.scaled_dot_product_attention(
        q_NQD[None],
        k_NLD[None],
        v_NLD[None],
        attn_mask=mask,
        is_causal=num_new == span.context_len and num_new > 1,
        enable_gqa=True,
    )[0]
    out_TO[span.start : span.end] = out_NQD.transpose(0, 1).reshape(num_new, -1)
