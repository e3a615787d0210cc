"""The float32 CPU kernels behind the `Kernels` interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.modules import GROUPS, MODULE_INDEX, MODULES
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.cpu import team
from loraplex.kernels.cpu.attention import DECODE_ATTENTION
from loraplex.kernels.cpu.blas import sgemm_address
from loraplex.kernels.cpu.lora import LORA_PRODUCTS, LORA_ROWS
from loraplex.kernels.cpu.rows import RMS_NORM, ROPE_AND_CACHE, SILU_MUL
from loraplex.kernels.interface import PackedLinear
from loraplex.kernels.lora import LoraSegment, LoraWeights, add_lora_segment, merged_weight
from loraplex.kernels.reference import TorchKernels, TorchLinear

# A segment this long or longer is compute-bound: the matrix library is faster than one pass over the weights.
_GEMM_ROWS = 6
_MIN_BLOCK_ROWS, _MAX_BLOCK_ROWS = 16, 128
# With at least this many short segments, each is one work item: its weights are then one stream in memory.
_WHOLE_SEGMENTS = 8
# The blocked layout oneDNN chooses depends little on the batch; this is a decode batch.
_PACK_ROWS = 16
# Up to here, every number of rows is computed as it is; beyond, there are 16 sizes per doubling.
_EXACT_ROWS = 32


def padded_rows(num_rows: int) -> int:
    """Return the number of rows to compute for a product of `num_rows`: the same up to 32, then up to 1/16
    more.

    oneDNN compiles a product for each number of rows, which takes some 0.5 MB; most of it stays in use
    whatever the size of its cache. Nearly all steps differ in their number of rows, up to thousands.
    """
    shift = max((num_rows - 1).bit_length() - _EXACT_ROWS.bit_length() + 1, 0)
    return -(-num_rows >> shift) << shift


class PackedFloat32Linear:
    """A weight reordered once into oneDNN's blocked layout, so that no product repacks it, and multiplied
    with few different numbers of rows."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self.out_features = weight_OI.shape[0]
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACK_ROWS)
        self._bias_O = bias_O

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        num_rows = x_TI.shape[0]
        if (num_missing := padded_rows(num_rows) - num_rows) > 0:
            padded_TI = x_TI.new_empty(num_rows + num_missing, x_TI.shape[1])
            padded_TI[:num_rows] = x_TI
            padded_TI[num_rows:] = 0
            x_TI = padded_TI
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._packed, self._bias_O, "none", [], "")
        return y[:num_rows] if num_missing > 0 else y

    def weight(self) -> torch.Tensor:
        # Reordering only moves numbers, so the way back is exact (`why_not_merged` makes sure of it).
        weight_OI: torch.Tensor = self._packed.to_dense()
        return weight_OI

    def with_weight(self, weight_OI: torch.Tensor) -> PackedFloat32Linear:
        return PackedFloat32Linear(weight_OI, self._bias_O)


@dataclass(frozen=True, kw_only=True, slots=True)
class _LoraSplit:
    """A step's segments as the kernels' arrays, by the kernel that computes them.

    short: few rows, memory-bound; highest rank first, to balance the threads. long: compute-bound, cut into
    blocks of rows to distribute. `segments` keeps the weights behind the addresses alive, and is used for
    long ones where torch exports no matrix product.
    """

    short: npt.NDArray[np.int64]
    long: npt.NDArray[np.int64]
    segments: tuple[LoraSegment, ...]


class NumbaKernels(TorchKernels):
    """Float32 on CPUs: oneDNN for matrix products, compiled kernels for everything between them."""

    def __init__(self, head_dim: int) -> None:
        self._softmax_scale = torch.tensor([head_dim**-0.5], dtype=torch.float32)
        self._eps_cells: dict[float, torch.Tensor] = {}

    def pack_linear(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> PackedLinear:
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            return PackedFloat32Linear(weight_OI, bias_O)
        return TorchLinear(weight_OI, bias_O)

    def merge_linear(
        self,
        linear: PackedLinear,
        layer: int,
        group: str,
        weights: LoraWeights,
        into_OI: torch.Tensor | None = None,
    ) -> PackedLinear:
        if not isinstance(linear, PackedFloat32Linear):
            return super().merge_linear(linear, layer, group, weights, into_OI)
        assert into_OI is None, "packed weights lie where torch puts them"
        unpacked_OI = linear.weight()  # a copy, so the sum may take its place
        return linear.with_weight(merged_weight(unpacked_OI, weights.groups[layer].get(group), unpacked_OI))

    @cached_property
    def why_not_merged(self) -> str | None:
        """Packed weights are unpacked to be merged. That is exact as far as we know, and tried out here on
        numbers that arithmetic would change: another release of torch may pack differently."""
        weight_OI = torch.randn(37, 53, generator=torch.Generator().manual_seed(0))
        weight_OI[0, :4] = torch.tensor([-0.0, 1e-42, float("inf"), torch.finfo(torch.float32).max])
        try:
            unpacked_OI = self.pack_linear(weight_OI, None).weight()
            if torch.equal(unpacked_OI.view(torch.int32), weight_OI.view(torch.int32)):
                return None
        except (RuntimeError, NotImplementedError):
            pass
        return (
            f"torch {torch.__version__} does not give back weights exactly that it has packed for this "
            "processor; serve without merging, or with another release of torch"
        )

    def rms_norm(self, x_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
        return self._norm(x_TH.contiguous(), None, weight_H, eps)

    def add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return self._norm(x_TH, residual_TH, weight_H, eps)

    def _norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        cell = self._eps_cells.get(eps)
        if cell is None:
            cell = self._eps_cells[eps] = torch.tensor([eps], dtype=torch.float32)
        out = torch.empty_like(x)
        size = x.shape[-1]
        residual_address = 0 if residual is None else residual.data_ptr()
        team.run(
            RMS_NORM,
            (
                x.data_ptr(),
                residual_address,
                out.data_ptr(),
                x.numel() // size,
                size,
                weight_H.data_ptr(),
                cell.data_ptr(),
            ),
        )
        return out

    def rope_and_cache(
        self,
        qkv_TO: torch.Tensor,
        cos_sin_PD: torch.Tensor,
        batch: KernelBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> None:
        num_kv_heads, block_size, head_dim = v_cache.shape[1:]
        team.run(
            ROPE_AND_CACHE,
            (
                qkv_TO.data_ptr(),
                qkv_TO.shape[0],
                qkv_TO.shape[1],
                cos_sin_PD.data_ptr(),
                batch.positions_T.data_ptr(),
                batch.slots_T.data_ptr(),
                k_cache.data_ptr(),
                v_cache.data_ptr(),
                num_kv_heads,
                block_size,
                head_dim,
            ),
        )

    def _decode_attention(
        self,
        qkv_TO: torch.Tensor,
        batch: KernelBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out_TO: torch.Tensor,
    ) -> None:
        num_rows = batch.decode_rows_D.shape[0]
        if num_rows == 0:
            return
        num_kv_heads, block_size, head_dim = v_cache.shape[1:]
        team.run(
            DECODE_ATTENTION,
            (
                qkv_TO.data_ptr(),
                qkv_TO.shape[1],
                out_TO.data_ptr(),
                out_TO.shape[1],
                batch.decode_rows_D.data_ptr(),
                batch.decode_context_D.data_ptr(),
                batch.decode_blocks_DB.data_ptr(),
                num_rows,
                batch.decode_blocks_DB.shape[1],
                k_cache.data_ptr(),
                v_cache.data_ptr(),
                num_kv_heads,
                block_size,
                head_dim,
                out_TO.shape[1] // (num_kv_heads * head_dim),
                self._softmax_scale.data_ptr(),
            ),
        )

    def silu_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        num_rows, double = gate_up_T2F.shape
        out = torch.empty(num_rows, double // 2, dtype=gate_up_T2F.dtype)
        team.run(SILU_MUL, (gate_up_T2F.data_ptr(), out.data_ptr(), num_rows, double // 2))
        return out

    def prepare_lora(self, segments: Sequence[LoraSegment]) -> _LoraSplit:
        by_rank = sorted(segments, key=lambda s: -s.weights.max_rank)
        short = [(s.start, s.end, s) for s in by_rank if s.end - s.start < _GEMM_ROWS]
        long = [s for s in by_rank if s.end - s.start >= _GEMM_ROWS]
        return _LoraSplit(short=_rows(short), long=_rows(_row_blocks(long)), segments=tuple(segments))

    def add_lora(
        self, y_TO: torch.Tensor, x_TI: torch.Tensor, batch: KernelBatch, layer: int, group: str
    ) -> None:
        split: _LoraSplit = batch.lora
        if not split.segments:
            return
        modules = GROUPS[group]
        operands = (
            x_TI.data_ptr(),
            x_TI.shape[1],
            y_TO.data_ptr(),
            y_TO.shape[1],
            x_TI.shape[1],
            layer * len(MODULES) + MODULE_INDEX[modules[0]],
            len(modules),
        )
        if len(split.short) > 0:
            per_item = len(modules) if len(split.short) >= _WHOLE_SEGMENTS else 1
            team.run(LORA_ROWS, (*operands, per_item, split.short.ctypes.data, len(split.short)))
        if len(split.long) == 0:
            return
        routine = sgemm_address()
        if routine is not None:
            team.run(LORA_PRODUCTS, (*operands, split.long.ctypes.data, len(split.long), routine))
            return
        for segment in split.segments:
            lora_group = segment.weights.groups[layer].get(group)
            if lora_group is not None and segment.end - segment.start >= _GEMM_ROWS:
                add_lora_segment(y_TO, x_TI, segment, lora_group)


def _row_blocks(segments: Sequence[LoraSegment]) -> list[tuple[int, int, LoraSegment]]:
    """Cut segments so that every thread gets some, without blocks too small for a matrix product."""
    num_rows = sum(segment.end - segment.start for segment in segments)
    block = max(_MIN_BLOCK_ROWS, min(_MAX_BLOCK_ROWS, -(-num_rows // torch.get_num_threads())))
    return [
        (start, min(start + block, segment.end), segment)
        for segment in segments
        for start in range(segment.start, segment.end, block)
    ]


def _rows(spans: Sequence[tuple[int, int, LoraSegment]]) -> npt.NDArray[np.int64]:
    rows = [(start, end - start, segment.weights.table_LM.data_ptr()) for start, end, segment in spans]
    return np.array(rows, dtype=np.int64)
