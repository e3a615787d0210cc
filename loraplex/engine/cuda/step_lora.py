"""LoRA work of a step, in two parts: decoding rows are bound by reading weights, prompts by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.shape import ModelShape
from loraplex.engine.cuda.step_buffers import DeviceBlock, StepSizes
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.triton.lora_blocks import BlocksLaunch
from loraplex.kernels.triton.lora_rows import RowsLaunch
from loraplex.kernels.triton.lora_step import LoraScratch, LoraStep, cut_tiles, new_step
from loraplex.kernels.triton.triton_kernels import StepSegments

_ROWS_TO_SHARE, _ROWS_OVER_RANK = 1.5, 80
"""It pays to read an adapter's weights once for several rows from (mean rows per adapter) = 1.5 + 80 / (mean
rank of the rows) on: the smaller the weights, the less there is to read."""
SHARED_BESIDE_PROMPTS: Final = 16
"""From this many decoding rows on one adapter, beside prompts, they are computed in the prompts' tiles. Those
tiles have room for so many rows, whatever the rank, so fewer rows would leave most of one empty."""

Tiles = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""First row and number of rows of each tile; the address of its adapter's table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLora:
    """Tiles on the host, the groups of linears that the adapters touch, whether `decode_tiles` share
    adapters, and how prompts are cut into tiles. Of a step with prompts, `span_tiles` also has the decoding
    rows that share an adapter with many others."""

    decode_tiles: Tiles
    span_tiles: Tiles
    groups: frozenset[str]
    shares: bool
    span_launch: BlocksLaunch

    def steps(
        self, shape: ModelShape, block: DeviceBlock, scratch: StepScratch | None = None
    ) -> tuple[LoraStep, ...]:
        """Return the kernels' LoRA steps over the tiles of a block on the device. `scratch`: memory shared
        with other steps; None to allocate it."""
        if not self.groups:
            return ()
        sizes = block.sizes
        steps = []
        if sizes.decode_tiles > 0:
            steps.append(
                new_step(
                    shape,
                    tiles_N2=block["decode_tiles"],
                    tables_N=block["decode_tables"],
                    num_rows=sizes.decodes,
                    launch=_decode_launch(self.shares, sizes.decode_tiles, sizes.decodes),
                    groups=self.groups,
                    scratch=None if scratch is None else scratch.decodes,
                )
            )
        if sizes.span_tiles > 0:
            steps.append(
                new_step(
                    shape,
                    tiles_N2=block["span_tiles"],
                    tables_N=block["span_tables"],
                    num_rows=sizes.rows,
                    launch=self.span_launch,
                    groups=self.groups,
                    scratch=None if scratch is None else scratch.spans,
                )
            )
        return tuple(steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepScratch:
    """Scratch memory of both parts, shared by steps up to some size that run one after the other."""

    decodes: LoraScratch
    spans: LoraScratch

    @classmethod
    def for_sizes(cls, shape: ModelShape, sizes: Sequence[StepSizes], device: torch.device) -> StepScratch:
        return cls(
            decodes=LoraScratch.empty(
                shape,
                num_tiles=max(size.decode_tiles for size in sizes),
                num_rows=max(size.decodes for size in sizes),
                launches=[RowsLaunch(), *(BlocksLaunch.for_decode(size.decodes) for size in sizes)],
                device=device,
            ),
            spans=LoraScratch.empty(
                shape,
                num_tiles=max(size.span_tiles for size in sizes),
                num_rows=max(size.rows for size in sizes),
                launches=[BlocksLaunch.for_prompts(size.rows) for size in sizes],
                device=device,
            ),
        )


def split_segments(batch: KernelBatch, *, may_share: bool = True, num_rows: int | None = None) -> StepLora:
    """Cut a step's segments, which begin with those of the decoding rows, into tiles. Without `may_share` the
    rows of a step that only decodes are computed one by one, even if they share adapters. `num_rows`: of the
    step with its padding, if it has any."""
    segments: StepSegments | None = batch.lora
    num_rows = num_rows or batch.token_ids_T.shape[0]
    if segments is None:
        return no_tiles(frozenset(), shares=False, num_rows=num_rows)
    lengths = segments.spans_N2[:, 1]
    decodes = segments.spans_N2[:, 0] < batch.decode_rows_D.shape[0]
    shares = may_share and bool(decodes.all()) and _sharing_pays(lengths, segments.ranks_N)
    if not decodes.all():
        decodes &= lengths < SHARED_BESIDE_PROMPTS
    decode_launch = _decode_launch(shares, int(decodes.sum()), num_rows)
    span_launch = BlocksLaunch.for_prompts(num_rows)
    return StepLora(
        decode_tiles=cut_tiles(segments.spans_N2[decodes], segments.tables_N[decodes], decode_launch),
        span_tiles=cut_tiles(segments.spans_N2[~decodes], segments.tables_N[~decodes], span_launch),
        groups=segments.groups,
        shares=shares,
        span_launch=span_launch,
    )


def no_tiles(groups: frozenset[str], *, shares: bool, num_rows: int) -> StepLora:
    """Return LoRA work without tiles: of a step without adapters, or one that is only captured."""
    none = np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.int64)
    return StepLora(
        decode_tiles=none,
        span_tiles=none,
        groups=groups,
        shares=shares,
        span_launch=BlocksLaunch.for_prompts(num_rows),
    )


def _sharing_pays(lengths_N: npt.NDArray[np.int64], ranks_N: npt.NDArray[np.int64]) -> bool:
    """Return whether rows on one adapter should share reads of its weights. `lengths_N`: the rows of each
    adapter; `ranks_N`: its largest rank."""
    num_rows = int(lengths_N.sum())
    if num_rows == 0:
        return False
    mean_rank = float(lengths_N @ ranks_N) / num_rows
    return bool(lengths_N.mean() >= _ROWS_TO_SHARE + _ROWS_OVER_RANK / max(mean_rank, 1.0))


def _decode_launch(shares: bool, num_tiles: int, num_rows: int) -> RowsLaunch | BlocksLaunch:
    return BlocksLaunch.for_decode(num_rows) if shares else RowsLaunch.for_segments(num_tiles)
