"""The input of the LoRA kernels for one step, and the two launches for each group of linears.

h       (splits, T, 3 * MAX_RANK) float32: shrunk inputs of three modules, shared by all layers
counts  (tiles * MAX_RANK_BLOCKS)   int32: zeros between launches (`lora_blocks`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton

from loraplex.core.modules import GROUPS, MAX_RANK, MODULES
from loraplex.core.shape import ModelShape
from loraplex.kernels.lora import TABLE_COLUMNS
from loraplex.kernels.triton.lora_blocks import MAX_RANK_BLOCKS, BlocksLaunch, expand_blocks, shrink_blocks
from loraplex.kernels.triton.lora_entries import first_row, gather_entries
from loraplex.kernels.triton.lora_rows import RowsLaunch, expand_rows, shrink_rows

Launch = RowsLaunch | BlocksLaunch


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraStep:
    """Some of a step's rows, cut into tiles that share an adapter, on the device.

    Only the contents of the tensors change between replays of a graph that was captured with them. `launch`
    names the kernels, and so how segments are cut. `groups`: groups of linears that any adapter touches.
    """

    tiles_N2: torch.Tensor
    tables_N: torch.Tensor
    entries: torch.Tensor
    shrunk_STR: torch.Tensor
    counts: torch.Tensor
    launch: Launch
    groups: frozenset[str]

    def gather(self) -> None:
        """Gather the adapters' tables. Call once a step, before the first layer."""
        gather_entries(self.tiles_N2, self.tables_N, self.entries)

    def add(self, y_TO: torch.Tensor, x_TI: torch.Tensor, shape: ModelShape, layer: int, group: str) -> None:
        """Add the LoRA products of one group of linears to y."""
        self.shrink(x_TI, layer, group)
        self.expand(y_TO, x_TI.shape[1], shape, layer, group)

    def shrink(self, x_TI: torch.Tensor, layer: int, group: str) -> None:
        """Compute the half that needs only the inputs: it may run beside the base model's product."""
        modules, row = GROUPS[group], first_row(layer, group)
        if isinstance(self.launch, RowsLaunch):
            shrink_rows(
                x_TI, self.shrunk_STR, self.tiles_N2, self.entries,
                table_row=row, num_modules=len(modules), launch=self.launch,
            )  # fmt: skip
        else:
            shrink_blocks(
                x_TI, self.shrunk_STR, self.tiles_N2, self.entries, self.counts,
                table_row=row, num_modules=len(modules), launch=self.launch,
            )  # fmt: skip

    def expand(self, y_TO: torch.Tensor, in_features: int, shape: ModelShape, layer: int, group: str) -> None:
        modules, row = GROUPS[group], first_row(layer, group)
        outs = tuple(shape.out_features(module) for module in modules)
        if isinstance(self.launch, RowsLaunch):
            expand_rows(
                y_TO, self.shrunk_STR, self.tiles_N2, self.entries, table_row=row, out_features=outs,
                num_splits=triton.cdiv(in_features, self.launch.shrink_block_k), launch=self.launch,
            )  # fmt: skip
        else:
            expand_blocks(
                y_TO, self.shrunk_STR, self.tiles_N2, self.entries,
                table_row=row, out_features=outs, launch=self.launch,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraScratch:
    """Memory of a step that the next step may reuse."""

    entries: torch.Tensor
    shrunk: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def empty(
        cls,
        shape: ModelShape,
        *,
        num_tiles: int,
        num_rows: int,
        launches: Sequence[Launch],
        device: torch.device,
    ) -> LoraScratch:
        """Return memory that is enough for a step by any of these launches."""
        sizes = [_scratch_sizes(shape, num_tiles, num_rows, launch) for launch in launches]
        return cls(
            entries=torch.zeros(math.prod(sizes[0][0]), dtype=torch.int64, device=device),
            shrunk=torch.empty(max(math.prod(shrunk) for _, shrunk in sizes), device=device),
            counts=torch.zeros(num_tiles * MAX_RANK_BLOCKS, dtype=torch.int32, device=device),
        )


def new_step(
    shape: ModelShape,
    *,
    tiles_N2: torch.Tensor,
    tables_N: torch.Tensor,
    num_rows: int,
    launch: Launch,
    groups: frozenset[str],
    scratch: LoraScratch | None = None,
) -> LoraStep:
    """Return a step over tiles among the first `num_rows` rows of a batch. `scratch`: None for its own."""
    num_tiles = tiles_N2.shape[0]
    if scratch is None:
        scratch = LoraScratch.empty(
            shape, num_tiles=num_tiles, num_rows=num_rows, launches=[launch], device=tiles_N2.device
        )
    entries, shrunk = _scratch_sizes(shape, num_tiles, num_rows, launch)
    return LoraStep(
        tiles_N2=tiles_N2,
        tables_N=tables_N,
        entries=scratch.entries[: math.prod(entries)].view(entries),
        shrunk_STR=scratch.shrunk[: math.prod(shrunk)].view(shrunk),
        counts=scratch.counts,
        launch=launch,
        groups=groups,
    )


def _scratch_sizes(
    shape: ModelShape, num_tiles: int, num_rows: int, launch: Launch
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes of the entries, alike for all launches, and of the shrunk inputs."""
    widest = max(shape.in_features(module) for module in MODULES)
    if isinstance(launch, RowsLaunch):
        splits = triton.cdiv(widest, launch.shrink_block_k)
    else:
        splits = launch.shrink_splits
    table_rows = shape.num_layers * len(MODULES)
    return (table_rows, num_tiles, TABLE_COLUMNS), (splits, num_rows, 3 * MAX_RANK)


def cut_tiles(
    spans_N2: npt.NDArray[np.int64], tables_N: npt.NDArray[np.int64], launch: Launch
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return segments cut into the tiles of the kernels, each with its adapter's table."""
    tiles = [
        (start, min(launch.block_m, first + count - start), table)
        for (first, count), table in zip(spans_N2.tolist(), tables_N.tolist(), strict=True)
        for start in range(first, first + count, launch.block_m)
    ]
    found = np.array(tiles, dtype=np.int64).reshape(-1, 3)
    return found[:, :2], found[:, 2]
