"""The Triton kernels behind the `Kernels` interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.modules import GROUPS
from loraplex.core.shape import ModelShape
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.interface import PackedLinear
from loraplex.kernels.lora import LoraSegment, LoraWeights
from loraplex.kernels.reference import TorchKernels
from loraplex.kernels.triton.decode_attention import DecodeScratch, choose_num_splits, decode_attention
from loraplex.kernels.triton.merge import merge_group
from loraplex.kernels.triton.prefill_attention import prefill_attention
from loraplex.kernels.triton.rope import rope_and_cache
from loraplex.kernels.triton.rows import add_rms_norm, rms_norm, silu_mul

_CPU_PROGRAMS = 4
"""Number of multiprocessors to assume where kernels are interpreted."""


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_PROGRAMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSegments:
    """A step's segments on the host. On the device, `KernelBatch.lora` is a tuple of `LoraStep`.

    spans_N2: first row and number of rows; tables_N: address of the adapter's table; ranks_N: the largest
    rank of its modules; groups: the groups of linears that any of the adapters touches.
    """

    spans_N2: npt.NDArray[np.int64]
    tables_N: npt.NDArray[np.int64]
    ranks_N: npt.NDArray[np.int64]
    groups: frozenset[str]


class TritonKernels(TorchKernels):
    """Triton kernels for any dtype on a CUDA device; matrix products are torch's own."""

    decodes_first = True

    def __init__(self, shape: ModelShape, device: torch.device, num_sms: int | None = None) -> None:
        """`num_sms`: multiprocessors to plan for, if not the device's own."""
        self._shape = shape
        self._num_sms = num_sms or multiprocessors(device)
        self._side_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._scratch = DecodeScratch.empty(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            num_sms=self._num_sms,
            device=device,
        )

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x_TH, weight_H, eps)

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return add_rms_norm(x_TH, residual_TH, weight_H, eps)

    def silu_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        return silu_mul(gate_up_T2F)

    def rope_and_cache(
        self,
        qkv_TO: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        batch: KernelBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        rope_and_cache(qkv_TO, cos_sin_PD, batch.positions_T, batch.slots_T, k_cache, v_cache)

    def attention(
        self, qkv_TO: torch.Tensor, batch: KernelBatch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        shape = self._shape
        out_TO = torch.empty(qkv_TO.shape[0], shape.q_size, dtype=qkv_TO.dtype, device=qkv_TO.device)
        num_decodes = batch.decode_rows_D.shape[0]
        if num_decodes > 0:
            decode_attention(
                qkv_TO,
                batch.decode_rows_D,
                batch.decode_context_D,
                batch.decode_blocks_DB,
                k_cache,
                v_cache,
                out_TO,
                choose_num_splits(num_decodes, shape.num_kv_heads, self._num_sms),
                self._scratch,
            )
        if batch.max_span_len > 0:
            prefill_attention(
                qkv_TO,
                batch.span_starts_S,
                batch.span_lens_S,
                batch.span_context_S,
                batch.span_blocks_SB,
                k_cache,
                v_cache,
                out_TO,
                batch.max_span_len,
            )
        return out_TO

    def linear(
        self, linear: PackedLinear, x_TI: torch.Tensor, batch: KernelBatch, layer: int, group: str
    ) -> torch.Tensor:
        steps = [step for step in batch.lora if group in step.groups]
        if self._side_stream is None or not steps:
            self._await_weights(batch, layer, group)
            y_TO = linear(x_TI)
            for step in steps:
                step.add(y_TO, x_TI, self._shape, layer, group)
            return y_TO
        # Both read weights, and neither alone uses the full memory bandwidth: they run concurrently.
        main = torch.cuda.current_stream()
        self._side_stream.wait_stream(main)
        with torch.cuda.stream(self._side_stream):
            self._await_weights(batch, layer, group)
            # Those of prompts first: they are short, and CPU workers may wait for their inputs.
            for step in reversed(steps):
                step.shrink(x_TI, layer, group)
        y_TO = linear(x_TI)
        main.wait_stream(self._side_stream)
        for step in steps:
            step.expand(y_TO, x_TI.shape[1], self._shape, layer, group)
        return y_TO

    def _await_weights(self, batch: KernelBatch, layer: int, group: str) -> None:
        """Wait for a layer's weights, before the first of its groups that adapters touch."""
        touched = frozenset[str]().union(*(step.groups for step in batch.lora))
        if batch.gate is not None and group == next((name for name in GROUPS if name in touched), None):
            batch.gate.await_layer(layer)

    def merge_linear(
        self,
        linear: PackedLinear,
        layer: int,
        group: str,
        weights: LoraWeights,
        into_OI: torch.Tensor | None = None,
    ) -> PackedLinear:
        weight_OI = linear.weight()
        merged_OI = torch.empty_like(weight_OI) if into_OI is None else into_OI
        outs = tuple(self._shape.out_features(module) for module in GROUPS[group])
        merge_group(weight_OI, merged_OI, weights.table_LM, layer=layer, group=group, out_features=outs)
        return linear.with_weight(merged_OI)

    def prepare_lora(self, segments: Sequence[LoraSegment]) -> StepSegments | None:
        """Return the segments for the host's part of a step; None if no row has an adapter."""
        if not segments:
            return None
        batch_rank = max(s.weights.max_rank for s in segments)
        return StepSegments(
            spans_N2=np.array([(s.start, s.end - s.start) for s in segments], dtype=np.int64),
            tables_N=np.array([s.weights.table_address(batch_rank) for s in segments], dtype=np.int64),
            ranks_N=np.array([s.weights.max_rank for s in segments], dtype=np.int64),
            groups=frozenset().union(*(s.weights.touched for s in segments)),
        )
