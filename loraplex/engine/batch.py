"""Lays out a step plan as tensors, with the rows of one adapter adjacent, and which row each logit comes
from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from loraplex.engine.block_tables import BlockTables, Integers
from loraplex.kernels.batch import KernelBatch
from loraplex.kernels.interface import Kernels
from loraplex.kernels.lora import LoraSegment, LoraWeights
from loraplex.scheduling.plan import Chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltBatch:
    """A batch, and the requests that its logit rows belong to.

    `sampling`: request id -> the logit row its next token is sampled from, in batch order.
    `rows_of`: request id -> the logit rows of its whole chunk, for requests in `all_rows_of`.
    `chunks`: in the order of their rows.
    """

    chunks: tuple[Chunk, ...]
    batch: KernelBatch
    sampling: dict[str, int]
    rows_of: dict[str, slice]


class BatchBuilder:
    """Builds batches for one model on one device.

    `tables`: the block tables of running requests. The caller must report when a request ends or is
    preempted, and when blocks were moved.
    """

    def __init__(self, kernels: Kernels, block_size: int) -> None:
        self._kernels = kernels
        self._block_size = block_size
        self.tables = BlockTables()

    def build(
        self,
        chunks: Sequence[Chunk],
        adapters: Mapping[str, LoraWeights] | None,
        all_rows_of: Collection[str] = (),
    ) -> BuiltBatch:
        """`adapters`: None for a step on merged weights, without LoRA products. `all_rows_of`: requests that
        need logits for every row of their chunk."""
        ordered = sorted(chunks, key=self._place)
        starts = _starts(ordered)
        logit_rows, sampling, rows_of = self._choose_rows(ordered, starts, all_rows_of)
        table_rows = self.tables.rows_of(ordered)
        placed = list(enumerate(zip(ordered, starts, strict=True)))
        decodes = [(index, *pair) for index, pair in placed if pair[0].num_tokens == 1]
        decodes.sort(key=lambda each: each[1].end, reverse=True)  # a long one begun last would delay the step
        spans = [(index, *pair) for index, pair in placed if pair[0].num_tokens > 1]
        positions, slots = self._positions_and_slots(ordered, starts, table_rows)
        batch = KernelBatch(
            token_ids_T=torch.tensor([token for chunk in ordered for token in chunk.token_ids or (0,)]),
            positions_T=torch.from_numpy(positions),
            slots_T=torch.from_numpy(slots),
            decode_rows_D=torch.tensor([start for _, _, start in decodes], dtype=torch.int64),
            decode_context_D=torch.tensor([c.end for _, c, _ in decodes], dtype=torch.int64),
            decode_blocks_DB=self._block_table(decodes, table_rows),
            span_starts_S=torch.tensor([start for _, _, start in spans], dtype=torch.int64),
            span_lens_S=torch.tensor([c.num_tokens for _, c, _ in spans], dtype=torch.int64),
            span_context_S=torch.tensor([c.end for _, c, _ in spans], dtype=torch.int64),
            span_blocks_SB=self._block_table(spans, table_rows),
            max_span_len=max((c.num_tokens for _, c, _ in spans), default=0),
            lora=self._kernels.prepare_lora(
                [] if adapters is None else self._segments(ordered, starts, adapters)
            ),
            logit_rows_L=torch.tensor(logit_rows, dtype=torch.int64),
        )
        return BuiltBatch(chunks=tuple(ordered), batch=batch, sampling=sampling, rows_of=rows_of)

    def _place(self, chunk: Chunk) -> tuple[bool, str]:
        """Return the sort key: rows of one adapter together, decodes first where the kernels need that."""
        return self._kernels.decodes_first and chunk.num_tokens > 1, chunk.adapter or ""

    def _segments(
        self, ordered: Sequence[Chunk], starts: Sequence[int], adapters: Mapping[str, LoraWeights]
    ) -> list[LoraSegment]:
        segments = []
        pairs = zip(ordered, starts, strict=True)
        for _, run in groupby(pairs, key=lambda pair: self._place(pair[0])):
            members = list(run)
            (first_chunk, first_start), (last_chunk, last_start) = members[0], members[-1]
            if first_chunk.adapter is not None:
                segments.append(
                    LoraSegment(
                        start=first_start,
                        end=last_start + last_chunk.num_tokens,
                        weights=adapters[first_chunk.adapter],
                    )
                )
        return segments

    def _choose_rows(
        self, ordered: Sequence[Chunk], starts: Sequence[int], all_rows_of: Collection[str]
    ) -> tuple[list[int], dict[str, int], dict[str, slice]]:
        rows: list[int] = []
        sampling: dict[str, int] = {}
        rows_of: dict[str, slice] = {}
        for chunk, start in zip(ordered, starts, strict=True):
            end = start + chunk.num_tokens
            if chunk.request_id in all_rows_of:
                rows_of[chunk.request_id] = slice(len(rows), len(rows) + end - start)
                rows += range(start, end)
            elif chunk.samples:
                rows.append(end - 1)
            if chunk.samples:
                sampling[chunk.request_id] = len(rows) - 1
        return rows, sampling, rows_of

    def _positions_and_slots(
        self, ordered: Sequence[Chunk], starts: Sequence[int], table_rows: Integers
    ) -> tuple[Integers, Integers]:
        """Return for every row of the batch its position in its sequence, and the slot of its keys and
        values."""
        lens = [chunk.num_tokens for chunk in ordered]
        shifts = np.array([chunk.start - start for chunk, start in zip(ordered, starts, strict=True)])
        positions = np.arange(starts[-1] + lens[-1]) + np.repeat(shifts, lens)
        indices, offsets = np.divmod(positions, self._block_size)
        blocks = self.tables.blocks_at(np.repeat(table_rows, lens), indices)
        return positions, blocks * self._block_size + offsets

    def _block_table(self, placed: Sequence[tuple[int, Chunk, int]], table_rows: Integers) -> torch.Tensor:
        """Return the block tables of these chunks, each given with its index in the batch."""
        width = max((len(chunk.block_ids) for _, chunk, _ in placed), default=0)
        rows = table_rows[[index for index, _, _ in placed]] if placed else table_rows[:0]
        return torch.from_numpy(self.tables.gather(rows, width))


def _starts(ordered: Sequence[Chunk]) -> list[int]:
    starts, row = [], 0
    for chunk in ordered:
        starts.append(row)
        row += chunk.num_tokens
    return starts
