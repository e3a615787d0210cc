"""Runs steps on the device: decode steps as captured graphs, steps with prompts kernel by kernel.

A graph is captured on first use for a number of rows, rounded up, for the set of linear groups that the
step's adapters touch, and for whether rows share adapters; which adapters those are, and their ranks, is
data. All graphs share one memory pool, as they never run at the same time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from loraplex.core.shape import ModelShape
from loraplex.engine.batch import BuiltBatch
from loraplex.engine.cuda.step_buffers import DeviceBlock, HostBlock, StepSizes
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.triton.lora_blocks import BlocksLaunch
from loraplex.kernels.triton.lora_rows import RowsLaunch
from loraplex.kernels.triton.lora_step import LoraStep, cut_tiles, new_step
from loraplex.kernels.triton.tokens import greedy_tokens, pick_tokens
from loraplex.kernels.triton.triton_kernels import StepSegments
from loraplex.model.decoder import Decoder, KVCache

GRAPH_ROWS: Final = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
"""Rows of the graphs; a step takes the smallest that holds it."""
_ROWS_TO_SHARE: Final = 2.5
"""From so many rows for each adapter on, reading its weights once for several pays."""
_MAX_DECODE_ROWS: Final = 16
"""Segments longer than this are prompts to the LoRA kernels, whatever they are to attention."""
_WARM_UPS: Final = 2
"""Runs before a capture: the first compiles the kernels and makes the libraries' workspaces."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """On the device: final states and logits of the logit rows, and (token, finite) of the greedy choice.

    A graph's tensors are written again by its next replay.
    """

    states_LH: torch.Tensor
    logits_LV: torch.Tensor
    tokens_L2: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Graph:
    """A captured step, and all memory outside the graphs' own pool that it reads or writes."""

    block: DeviceBlock
    lora: LoraStep | None
    graph: torch.cuda.CUDAGraph
    output: StepOutput


class StepRunner:
    """Owns the graphs and the seats' tokens."""

    def __init__(
        self,
        *,
        decoder: Decoder,
        caches: list[KVCache],
        num_seats: int,
        max_blocks: int,
        scratch_slot: int,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._caches = caches
        self._max_blocks = max_blocks
        self._scratch_slot = scratch_slot
        self._device = device
        self.last_tokens = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._graphs: dict[tuple[int, frozenset[str], bool], _Graph] = {}
        self._pool: Any = None

    def run(
        self, built: BuiltBatch, follows: list[bool], row_seats: list[int], logit_seats: list[int]
    ) -> StepOutput:
        """Launch a step. Lists are by row and by logit row; rows that follow start at their seat's token."""
        num_rows = built.batch.token_ids_T.shape[0]
        decodes_only = built.batch.max_span_len == 0 and len(logit_seats) == num_rows
        if decodes_only and num_rows <= GRAPH_ROWS[-1]:
            graph = self._graph_for(num_rows, built.batch.lora)
            launch = None if graph.lora is None else graph.lora.launch
            graph.block.upload(self._fill(graph.block.sizes, built, launch, follows, row_seats, logit_seats))
            graph.graph.replay()
            return graph.output
        launch = _eager_launch(built.batch)
        sizes = _exact_sizes(built, launch, len(logit_seats))
        block = DeviceBlock(sizes, self._device)
        block.upload(self._fill(sizes, built, launch, follows, row_seats, logit_seats))
        return self._forward(
            block, built.batch.max_span_len, self._lora_step(sizes, _groups(built.batch), launch, block)
        )

    def _forward(self, block: DeviceBlock, max_span_len: int, lora: LoraStep | None) -> StepOutput:
        token_ids_T = pick_tokens(
            block["token_ids"], block["follows"], block["token_seats"], self.last_tokens
        )
        if lora is not None:
            lora.gather()
        states_LH = self._decoder.forward(block.batch(token_ids_T, max_span_len, lora), self._caches)
        logits_LV = self._decoder.logits(states_LH)
        tokens_L2 = torch.empty(logits_LV.shape[0], 2, dtype=torch.int64, device=self._device)
        if logits_LV.shape[0] > 0:
            greedy_tokens(logits_LV, block["logit_seats"], self.last_tokens, tokens_L2)
        return StepOutput(states_LH=states_LH, logits_LV=logits_LV, tokens_L2=tokens_L2)

    def _graph_for(self, num_rows: int, segments: StepSegments | None) -> _Graph:
        rows = GRAPH_ROWS[bisect_left(GRAPH_ROWS, num_rows)]
        groups = frozenset() if segments is None else segments.groups
        shares = segments is not None and segments.rows_each >= _ROWS_TO_SHARE
        found = self._graphs.get((rows, groups, shares))
        if found is None:
            found = self._graphs[rows, groups, shares] = self._capture(rows, groups, shares)
        return found

    def _capture(self, rows: int, groups: frozenset[str], shares: bool) -> _Graph:
        launch = BlocksLaunch.for_decode() if shares else RowsLaunch.for_segments(rows)
        sizes = StepSizes(
            rows=rows, decodes=rows, decode_width=self._max_blocks, spans=0, span_width=0, logits=rows,
            segments=rows,
        )  # fmt: skip
        block = DeviceBlock(sizes, self._device)
        block.upload(HostBlock(sizes, self._scratch_slot, pinned=True))
        lora = self._lora_step(sizes, groups, launch, block)
        current = torch.cuda.current_stream()
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._forward(block, 0, lora)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = self._forward(block, 0, lora)
        self._pool = graph.pool()
        return _Graph(block=block, lora=lora, graph=graph, output=output)

    def _lora_step(
        self,
        sizes: StepSizes,
        groups: frozenset[str],
        launch: RowsLaunch | BlocksLaunch | None,
        block: DeviceBlock,
    ) -> LoraStep | None:
        if not groups or launch is None:
            return None
        return new_step(
            self._shape,
            segments_N2=block["segments"],
            tables_N=block["tables"],
            num_rows=sizes.rows,
            launch=launch,
            groups=groups,
        )

    @property
    def _shape(self) -> ModelShape:
        return self._decoder.config.shape

    def _fill(
        self,
        sizes: StepSizes,
        built: BuiltBatch,
        launch: RowsLaunch | BlocksLaunch | None,
        follows: list[bool],
        row_seats: list[int],
        logit_seats: list[int],
    ) -> HostBlock:
        batch = built.batch
        block = HostBlock(sizes, self._scratch_slot, pinned=True)
        block["token_ids"] = batch.token_ids_T.numpy()
        block["follows"] = follows
        block["token_seats"] = row_seats
        block["positions"] = batch.positions_T.numpy()
        block["slots"] = batch.slots_T.numpy()
        block["decode_rows"] = batch.decode_rows_D.numpy()
        block["decode_context"] = batch.decode_context_D.numpy()
        block["decode_blocks"] = batch.decode_blocks_DB.numpy()
        block["span_starts"] = batch.span_starts_S.numpy()
        block["span_lens"] = batch.span_lens_S.numpy()
        block["span_context"] = batch.span_context_S.numpy()
        block["span_blocks"] = batch.span_blocks_SB.numpy()
        block["logit_rows"] = batch.logit_rows_L.numpy()
        block["logit_seats"] = logit_seats
        block["segments"], block["tables"] = _tiles(batch, launch)
        return block


def _groups(batch: KernelBatch) -> frozenset[str]:
    segments: StepSegments | None = batch.lora
    return frozenset() if segments is None else segments.groups


def _eager_launch(batch: KernelBatch) -> RowsLaunch | BlocksLaunch | None:
    segments: StepSegments | None = batch.lora
    if segments is None:
        return None
    return BlocksLaunch.for_decode() if segments.max_rows <= _MAX_DECODE_ROWS else BlocksLaunch()


def _tiles(
    batch: KernelBatch, launch: RowsLaunch | BlocksLaunch | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    segments: StepSegments | None = batch.lora
    if segments is None or launch is None:
        return np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=np.int64)
    return cut_tiles(segments.spans_N2, segments.tables_N, launch)


def _exact_sizes(built: BuiltBatch, launch: RowsLaunch | BlocksLaunch | None, num_logits: int) -> StepSizes:
    batch = built.batch
    return StepSizes(
        rows=batch.token_ids_T.shape[0],
        decodes=batch.decode_rows_D.shape[0],
        decode_width=batch.decode_blocks_DB.shape[1],
        spans=batch.span_starts_S.shape[0],
        span_width=batch.span_blocks_SB.shape[1],
        logits=num_logits,
        segments=len(_tiles(batch, launch)[1]),
    )
