"""An adapter's weights as the kernels use them, and the LoRA product in plain torch.

A linear with an adapter computes y = W x + scale * B (A x). The A's of linears that share an input are
stacked, so one product shrinks x for all of them; each B is stored transposed, (rank, out), because the
kernels iterate over it rank by rank and write whole output rows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from loraplex.core.modules import MODULE_INDEX, MODULES


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPart:
    """One module's share of a group: columns [rank_start, rank_end) of the shrunk input produce its
    outputs."""

    module: str
    b_t_RO: torch.Tensor
    scale: float
    rank_start: int
    rank_end: int
    out_start: int
    out_end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraGroup:
    """The adapter's weights for one group of linears in one layer."""

    a_RI: torch.Tensor
    parts: tuple[LoraPart, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraWeights:
    """A resident adapter. `groups[layer]` maps group name -> LoraGroup; untouched groups are absent.

    `table_LM` is the same for compiled kernels: one int64 row for each layer and module (in the order of
    `core.modules.MODULES`) with the columns below; rank 0 means that the adapter does not touch the module.
    Weights on a GPU are found only through the table, whose addresses are relative to itself: `groups` is
    empty then. `touched`: the groups that the adapter has in any layer. `copies`: for an adapter that is
    padded to its batch's rank, padded rank -> bytes from this table to the table of the copy with this rank.
    """

    groups: tuple[dict[str, LoraGroup], ...]
    table_LM: torch.Tensor
    max_rank: int
    touched: frozenset[str]
    copies: Mapping[int, int] = field(default_factory=dict)

    def table_address(self, batch_rank: int) -> int:
        """Return the table's address for a batch with this largest rank."""
        return self.table_LM.data_ptr() + self.copies.get(padded_rank(batch_rank), 0)

    def touched_in(self, layer: int) -> frozenset[str]:
        """Return the groups that the adapter may change in a layer; on a GPU, those that it has in any."""
        return frozenset(self.groups[layer]) if self.groups else self.touched


def padded_rank(rank: int) -> int:
    """Return the next power of two."""
    return 1 << (rank - 1).bit_length()


TABLE_COLUMNS: Final = 6
"""Columns of a table row: address of A, address of B transposed, rank, first output column within the
group, number of outputs, bit pattern of the float32 scale."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSegment:
    """Rows [start, end) of the batch use this adapter."""

    start: int
    end: int
    weights: LoraWeights


def add_lora_segment(y_TO: torch.Tensor, x_TI: torch.Tensor, segment: LoraSegment, group: LoraGroup) -> None:
    """Add one segment's LoRA product to the base output, in place."""
    x_SI = x_TI[segment.start : segment.end]
    y_SO = y_TO[segment.start : segment.end]
    shrunk_SR = x_SI @ group.a_RI.t()
    for part in group.parts:
        y_SO[:, part.out_start : part.out_end].addmm_(
            shrunk_SR[:, part.rank_start : part.rank_end], part.b_t_RO, alpha=part.scale
        )


def merged_weight(
    weight_OI: torch.Tensor, group: LoraGroup | None, into_OI: torch.Tensor | None = None
) -> torch.Tensor:
    """Return W + scale * B A of a group's stacked weight, summed in float32 and rounded once. `group`: None
    for W itself. `into_OI`: memory for the result, which may be that of W; None to allocate it."""
    total_OI = weight_OI.to(torch.float32, copy=into_OI is not weight_OI)
    if group is not None:
        for part in group.parts:
            a_RI = group.a_RI[part.rank_start : part.rank_end].float()
            total_OI[part.out_start : part.out_end].addmm_(part.b_t_RO.float().t(), a_RI, alpha=part.scale)
    if into_OI is None:
        return total_OI.to(weight_OI.dtype)
    return into_OI.copy_(total_OI)


def host_weights(groups: tuple[dict[str, LoraGroup], ...], max_rank: int) -> LoraWeights:
    """Return weights whose tensors the host can read."""
    return LoraWeights(
        groups=groups,
        table_LM=build_table(groups),
        max_rank=max_rank,
        touched=frozenset(name for layer in groups for name in layer),
    )


def build_table(groups: Sequence[dict[str, LoraGroup]]) -> torch.Tensor:
    """Return the kernels' table of an adapter; it holds addresses, so the groups' memory must not move."""
    table_LM = torch.zeros(len(groups), len(MODULES), TABLE_COLUMNS, dtype=torch.int64)
    for layer, by_name in enumerate(groups):
        for group in by_name.values():
            row_bytes = group.a_RI.stride(0) * group.a_RI.element_size()
            for part in group.parts:
                table_LM[layer, MODULE_INDEX[part.module]] = torch.tensor(
                    [
                        group.a_RI.data_ptr() + part.rank_start * row_bytes,
                        part.b_t_RO.data_ptr(),
                        part.rank_end - part.rank_start,
                        part.out_start,
                        part.out_end - part.out_start,
                        struct.unpack("i", struct.pack("f", part.scale))[0],
                    ]
                )
    return table_LM
